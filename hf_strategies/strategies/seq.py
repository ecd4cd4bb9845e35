"""Continued pretraining: next-token cross-entropy over every token of every document.

The objective is that of `sft`; what differs is the data. A row is a document (or the piece of one that fits): all its
tokens train but the first, which has nothing to be predicted from, and no token sees or predicts another document's.
"""

from __future__ import annotations

from hf_strategies.strategies.sft import SFT, SFTOptions


class SeqOptions(SFTOptions):
    """Options of continued pretraining."""


class Seq(SFT):
    """See the module's docstring."""

    Options = SeqOptions
    options: SeqOptions
    packed = True
