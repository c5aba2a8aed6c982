"""The label of tokens that are not to be predicted."""

#: What torch's ``cross_entropy`` leaves out unless told otherwise.
IGNORED = -100
