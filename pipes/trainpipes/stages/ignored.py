"""The label of tokens that are not to be predicted."""

__all__ = ["IGNORED"]

#: What torch's ``cross_entropy`` leaves out unless told otherwise.
IGNORED = -100
