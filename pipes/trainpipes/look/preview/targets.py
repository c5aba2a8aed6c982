"""Which tokens the loss is about.

A token is learnt where it is a target: something is compared with the model's guess at it. Where its label
stands depends on the layout:

- ``aligned``: labels have the place of the token that they are, as in transformers; the model shifts them.
  So the first token of a row is never learnt: nothing comes before it.
- ``shifted``: the label at t is the token at t + 1, as in torchtitan and nanoGPT; the last one is a token
  that is not among the inputs.
- ``masked``: the label at t is what stood at t before it was hidden.
- ``classes``: the label at t is a class of the token at t.
- ``own``: the targets are a text of their own, an encoder-decoder's: all of it is learnt.
- ``mask``: there are no labels; a mask says which tokens are learnt, and but for that it is ``aligned``.

A negative label is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainpipes.look.preview.grids import Array

__all__ = ["Targets", "agree", "follow", "is_own", "targets_of"]

#: Labels below it, of ids above it, are classes of tokens and no tokens.
CLASSES = 256


@dataclass(frozen=True, eq=False)
class Targets:
    """What the loss is about.

    Attributes:
        layout: how targets stand to ids, as above; "" where there are none.
        learnt: which tokens are targets, bool ``[B, L]``; None where nothing says so.
        truth: labels that the tokens differ from, ``[B, L]``, where tokens are masked.
        beyond: of shifted labels, the target after each row's last token ``[B]``, -1 for none.
    """

    layout: str = ""
    learnt: Array | None = None
    truth: Array | None = None
    beyond: Array | None = None


def targets_of(ids: Array, compared: Array, there: Array, labels: Array, masked: bool) -> Targets:
    """The layout of labels, and what is learnt by it.

    Args:
        ids: ``[B, L]``.
        compared: the labels that the loss counts.
        there: no padding.
        labels: all of them.
        masked: whether the pipeline says that tokens are hidden.
    """
    valid = compared >= 0
    if not masked and agree(ids, labels, labels >= 0):
        learnt = valid.copy()
        learnt[:, :1] = False
        return Targets("aligned", learnt)
    if not masked and follow(ids, labels, there):
        learnt = np.zeros_like(valid)
        learnt[:, 1:] = valid[:, :-1]
        beyond = np.where(valid[:, -1], compared[:, -1], -1)
        rows, last = np.arange(len(ids)), there.shape[1] - 1 - there[:, ::-1].argmax(axis=1)
        inner = there.any(axis=1) & (last < there.shape[1] - 1)  # rows that padding follows
        ends = rows[inner], last[inner]
        beyond[inner] = np.where(valid[ends], compared[ends], -1)
        learnt[ends[0], ends[1] + 1] = False
        return Targets("shifted", learnt, beyond=beyond)
    classes = not masked and int(labels.max()) < CLASSES <= int(ids.max())
    return Targets("classes" if classes else "masked", valid, truth=compared)


def is_own(ids: Array, labels: Array) -> bool:
    """Whether labels of the shape of ids are another text: from the start of each row on, and other ids."""
    valid = labels >= 0
    begins = bool(valid.any()) and bool((valid[:, 1:] <= valid[:, :-1]).all())
    return begins and not agree(ids, labels, valid) and not follow(ids, labels, valid)


def agree(ids: Array, labels: Array, valid: Array) -> bool:
    return bool((ids == labels)[valid].all())


def follow(ids: Array, labels: Array, there: Array) -> bool:
    """Whether each label is the token after its place."""
    compared = (labels >= 0)[:, :-1] & there[:, 1:]
    return bool(compared.any()) and bool((ids[:, 1:] == labels[:, :-1])[compared].all())
