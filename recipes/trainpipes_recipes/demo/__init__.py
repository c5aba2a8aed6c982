"""What ``python -m trainpipes_recipes.demo`` runs: a training run that is killed twice and compared
with one that was left alone."""
