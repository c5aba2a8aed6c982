"""Functions of the user's, called for rows.

row_call     one of them, as it is called
row_random   a generator for each row
hands        who calls them for several rows at a time: threads, or
crew         worker processes
crew_member  what one does
crew_order   what is asked of it
crew_errors  what is said when it ends
passage      how rows get there and back
"""
