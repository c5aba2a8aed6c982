"""What users iterate, with a state before and after every item."""
