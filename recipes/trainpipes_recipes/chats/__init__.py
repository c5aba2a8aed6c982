"""Columns of conversations, many rows at once: what the recipes ``chat`` and ``preference`` are made of.

messages       ShareGPT's layout made OpenAI's
turns          what is wrong with a conversation
bad_rows       rows that teach nothing: refused, left out, or kept
conversations  all of that in one step, for recipes of your own too
shared_prompt  what two conversations have in common
"""
