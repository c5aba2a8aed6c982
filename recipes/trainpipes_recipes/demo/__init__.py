"""What ``python -m trainpipes_recipes.demo`` runs."""
