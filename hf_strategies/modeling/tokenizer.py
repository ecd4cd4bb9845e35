"""A run's tokenizer: loaded, and changed as its config says."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase


def load_tokenizer(model: str | nn.Module, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Tokenizer of a model id, path or loaded model.

    Raises:
        ValueError: the model does not say where it came from.
    """
    name = model if isinstance(model, str) else model.config._name_or_path  # type: ignore[union-attr]
    if not name:
        raise ValueError("processing_class is not given and the model does not say which tokenizer belongs to it")
    return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def adapt_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    chat_template_path: str | None = None,
    eos_token: str | None = None,
    pad_token: str | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer with another template or special tokens; a missing pad token becomes the end-of-sequence token.

    Args:
        tokenizer: changed in place, so that it is saved with what the model was trained on.
        chat_template_path: a file, or a folder or Hub id of a tokenizer.
        eos_token: a token of the vocabulary.
        pad_token: a token of the vocabulary.

    Raises:
        TypeError: no tokenizer.
        ValueError: a token that is not in the vocabulary, a template that cannot be read, or neither a pad nor an
            end-of-sequence token.
    """
    if not (callable(tokenizer) and hasattr(tokenizer, "pad_token_id")):
        raise TypeError(f"processing_class: got {type(tokenizer).__name__}, allowed is a tokenizer")
    vocabulary = tokenizer.get_vocab() if eos_token or pad_token else {}
    for name, token in (("eos_token", eos_token), ("pad_token", pad_token)):
        if token is None:
            continue
        if token not in vocabulary:
            raise ValueError(f"{name}={token!r}: allowed is a token of the tokenizer's vocabulary")
        setattr(tokenizer, name, token)
    if chat_template_path is not None:
        tokenizer.chat_template = read_chat_template(chat_template_path)
    if tokenizer.pad_token_id is None:
        # Safe with pad == eos: masks here never come from ids.
        if tokenizer.eos_token is None:
            raise ValueError("the tokenizer has neither pad_token nor eos_token; set one of them")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def read_chat_template(path: str) -> str:
    """A chat template from a file, or of the tokenizer in a folder or on the Hub.

    Raises:
        ValueError: nothing of it can be read, or it has no chat template.
    """
    if Path(path).is_file():
        return Path(path).read_text(encoding="utf-8")
    try:
        template = AutoTokenizer.from_pretrained(path).chat_template
    except (OSError, ValueError) as error:
        raise ValueError(
            f"chat_template_path={path!r} is neither a file nor a folder or id of a tokenizer: {error}"
        ) from error
    if not isinstance(template, str):
        raise ValueError(f"chat_template_path={path!r}: that tokenizer has no single chat_template")
    return template
