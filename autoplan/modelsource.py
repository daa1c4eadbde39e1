"""The MODEL argument: text that names a model -> the model and an example of its global batch.

    llama3-8b               a preset (data/models.yaml, and three architectures of our own)
    hf:PATH_OR_ID           a transformers config: a config.json, a folder with one, or an id; no weights are read
    FILE_OR_MODULE:FACTORY  your function; its call returns (model, batch)

Presets and `hf:` models are built on the meta device: nothing is allocated, whatever their size.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoplan.errors import UsageError

Batch = Mapping[str, Tensor] | tuple[Tensor, ...]
DEFAULT_GLOBAL_BATCH = 32


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """What the command line asks of the example batch; None: the source's own."""

    global_batch: int | None = None  # rows
    seq: int | None = None  # tokens a row

    def __post_init__(self) -> None:
        for flag, value in (("--global-batch", self.global_batch), ("--seq", self.seq)):
            if value is not None and value < 1:
                raise UsageError(f"{flag} must be at least 1, found {value}")

    @property
    def rows(self) -> int:
        return self.global_batch or DEFAULT_GLOBAL_BATCH


@dataclass(frozen=True, slots=True)
class Source:
    """A model with an example of its global batch. `config` is the transformers config where there is one."""

    name: str
    model: nn.Module
    batch: Batch
    config: Any = None


@dataclass(frozen=True, slots=True)
class Preset:
    """A named model. `seq` is its usual tokens a row, None where rows are no sequences."""

    name: str
    about: str
    model: str
    seq: int | None
    config: Mapping[str, Any]


def load(spec: str, sizes: BatchSizes = BatchSizes(), device: str = "meta") -> Source:
    """The model that `spec` names. Raises UsageError with the nearest fix."""
    if spec.startswith("hf:"):
        config = read_config(spec[3:])
        return from_config(spec, model_class(config), config, sizes, device)
    if ":" in spec:
        return _from_factory(spec, sizes)
    if spec in OWN:
        return _own(spec, sizes, device)
    preset = presets().get(spec)
    if preset is None:
        raise UsageError(_unknown(spec))
    cls = _transformers_class(preset.model)
    config = cls.config_class(**(_NO_DROPOUT | dict(preset.config)))
    return from_config(spec, cls, config, BatchSizes(sizes.global_batch, sizes.seq or preset.seq), device)


@cache
def presets() -> Mapping[str, Preset]:
    """The presets that transformers builds, in the order of data/models.yaml."""
    rows = yaml.safe_load((Path(__file__).parent / "data" / "models.yaml").read_text(encoding="utf-8"))
    return {name: Preset(name, row["about"], row["model"], row.get("seq"), row["config"]) for name, row in rows.items()}


def from_config(name: str, cls: Any, config: Any, sizes: BatchSizes, device: str = "meta") -> Source:
    """A transformers model of class `cls` in training mode, fp32, with a batch for its main input and labels.

    Batches hold zeros (on the meta device: nothing).
    """
    seq = _sequence_length(name, config, sizes)
    config.use_cache = False
    with torch.device(device):
        model = cls(config).train()
        if getattr(model, "loss_type", "") is None:
            model.loss_type = "ForCausalLM"  # what transformers falls back to, with a warning
        batch = _example_batch(name, model, config, sizes.rows, seq)
    return Source(name, model, batch, config)


def read_config(path_or_id: str) -> Any:
    """A transformers config from a config.json, a folder that holds one, or an id."""
    transformers = _transformers()
    path = Path(path_or_id).expanduser()
    looks_local = path.exists() or path_or_id.startswith((".", "/", "~")) or path_or_id.endswith(".json")
    if looks_local and not (path.is_file() or (path / "config.json").is_file()):
        found = "no config.json in this folder" if path.is_dir() else "no such file"
        raise UsageError(f"hf:{path_or_id}: {found}; give a config.json, a folder that holds one, or a model id")
    try:
        return transformers.AutoConfig.from_pretrained(str(path) if looks_local else path_or_id)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        fix = "is it a transformers config with a known model_type?" if looks_local else "no network, or no such id: download its config.json and pass hf:PATH"
        raise UsageError(f"hf:{path_or_id}: its config cannot be read ({reason}); {fix}") from error


def model_class(config: Any) -> Any:
    """The class that the config names, else the causal language model of its type."""
    transformers = _transformers()
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in mapping:
        return mapping[type(config)]
    raise UsageError(
        f"transformers {transformers.__version__} knows no architecture of this config (architectures {config.architectures!r}, "
        f"model_type {config.model_type!r}); add a class with a loss to `architectures`, or use FILE:FACTORY"
    )


def _mlp(rows: int, seq: int | None) -> tuple[nn.Module, Batch]:
    from autoplan.models import MLP

    return MLP((1024, 4096, 4096, 4096, 1000)), {"x": torch.zeros(rows, 1024), "labels": torch.zeros(rows, dtype=torch.int64)}


def _resnet50(rows: int, seq: int | None) -> tuple[nn.Module, Batch]:
    from autoplan.models import resnet50

    return resnet50(), {"images": torch.zeros(rows, 3, 224, 224), "labels": torch.zeros(rows, dtype=torch.int64)}


def _unet(rows: int, seq: int | None) -> tuple[nn.Module, Batch]:
    from autoplan.models import UNet

    return UNet(3, 3), {"x": torch.zeros(rows, 3, 256, 256), "target": torch.zeros(rows, 3, 256, 256)}


OWN: Mapping[str, tuple[str, Callable[[int, int | None], tuple[nn.Module, Batch]]]] = {
    "resnet50": ("ResNet-50, 224 x 224 images", _resnet50),
    "unet": ("U-Net of depth 4, 256 x 256 images", _unet),
    "mlp": ("plain MLP, 4 layers", _mlp),
}

_NO_DROPOUT = dict.fromkeys(
    ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "dropout_rate"), 0.0
)


def _own(name: str, sizes: BatchSizes, device: str) -> Source:
    if sizes.seq is not None:
        raise UsageError(f"--seq {sizes.seq}: {name} has no sequence; leave --seq out")
    with torch.device(device):
        model, batch = OWN[name][1](sizes.rows, None)
    return Source(name, model.train(), batch)


def _unknown(spec: str) -> str:
    names = [*presets(), *OWN]
    near = difflib.get_close_matches(spec.lower(), names, n=3, cutoff=0.5)
    hint = f"nearest: {', '.join(near)}" if near else "`autoplan models` lists them"
    if Path(spec).exists():
        hint = f"for a config say hf:{spec}, for a function {spec}:FACTORY"
    return f"unknown model {spec!r}; {hint}. Other forms: hf:PATH_OR_ID, FILE_OR_MODULE:FACTORY"


def _transformers() -> ModuleType:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError("this model comes from transformers, which is not installed; fix: pip install 'autoplan[models]'") from error


def _transformers_class(name: str) -> Any:
    transformers = _transformers()
    if not hasattr(transformers, name):
        raise UsageError(f"transformers {transformers.__version__} has no {name}; fix: pip install -U 'autoplan[models]'")
    return getattr(transformers, name)


def _sequence_length(name: str, config: Any, sizes: BatchSizes) -> int | None:
    if not hasattr(config, "vocab_size"):
        if sizes.seq is not None:
            raise UsageError(f"--seq {sizes.seq}: {name} has no sequence; leave --seq out")
        return None
    longest = getattr(config, "max_position_embeddings", None)
    stretches = any(hasattr(config, field) for field in ("rope_parameters", "rope_theta", "relative_attention_num_buckets"))
    if sizes.seq is None:
        return min(longest or 512, 4096)
    if longest and sizes.seq > longest and not stretches:
        raise UsageError(f"--seq {sizes.seq}: {name} has learned positions for {longest} tokens; use --seq {longest} or less")
    return sizes.seq


def _example_batch(name: str, model: nn.Module, config: Any, rows: int, seq: int | None) -> Batch:
    main = getattr(model, "main_input_name", "")
    accepts = inspect.signature(model.forward).parameters
    if "labels" not in accepts:
        raise UsageError(
            f"{name}: {type(model).__name__} has no labels and so no loss; name a class with a head in the config's `architectures`, or use FILE:FACTORY"
        )
    per_row = type(model).__name__.endswith(("ForSequenceClassification", "ForImageClassification"))
    if main == "input_ids" and seq is not None:
        tokens = torch.zeros(rows, seq, dtype=torch.int64)
        return {"input_ids": tokens, "labels": torch.zeros(rows, dtype=torch.int64) if per_row else torch.zeros_like(tokens)}
    if main == "pixel_values" and per_row:
        size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        return {"pixel_values": torch.zeros(rows, config.num_channels, size, size), "labels": torch.zeros(rows, dtype=torch.int64)}
    raise UsageError(f"{name}: no example batch is known for {type(model).__name__} (main input {main!r}); use FILE:FACTORY, whose call returns (model, batch)")


def _from_factory(spec: str, sizes: BatchSizes) -> Source:
    where, _, attribute = spec.rpartition(":")
    factory = getattr(_user_module(where), attribute, None)
    if not callable(factory):
        raise UsageError(f"{spec}: {where} has no function {attribute!r}")
    accepts = inspect.signature(factory).parameters
    given = {key: value for key, value in (("global_batch", sizes.global_batch), ("seq", sizes.seq)) if value is not None}
    arguments = {key: value for key, value in given.items() if key in accepts}
    if "seq" in given and "seq" not in accepts:
        raise UsageError(f"--seq {sizes.seq}: {spec} takes no `seq`; give the function a parameter of that name, or leave --seq out")
    try:
        result = factory(**arguments)
    except Exception as error:
        raise UsageError(f"{spec} raised {type(error).__name__}: {error}") from error
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module) and isinstance(result[1], dict | tuple)):
        raise UsageError(f"{spec} must return (model, batch): an nn.Module and a dict or tuple of tensors; found {type(result).__name__}")
    model, batch = result
    if "global_batch" in given and "global_batch" not in accepts:
        batch = _resized(spec, batch, given["global_batch"])
    return Source(spec, model, batch)


def _user_module(where: str) -> ModuleType:
    path = Path(where).expanduser()
    try:
        if path.suffix == ".py":
            if not path.is_file():
                raise UsageError(f"{where}: no such file")
            found = importlib.util.spec_from_file_location(path.stem, path)
            assert found is not None and found.loader is not None
            module = importlib.util.module_from_spec(found)
            sys.modules[path.stem] = module
            found.loader.exec_module(module)
            return module
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(where)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error


def _resized(spec: str, batch: Batch, rows: int) -> Batch:
    """The batch with `rows` rows: cut, or repeated from the start."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    found = sorted({t.shape[0] if t.dim() else 0 for t in tensors})
    if len(found) != 1 or not found[0]:
        raise UsageError(
            f"--global-batch {rows}: the tensors of {spec}'s batch start with different sizes {found}; give the function a parameter `global_batch`"
        )

    def resize(leaf: object) -> object:
        return leaf.repeat(-(-rows // found[0]), *[1] * (leaf.dim() - 1))[:rows].clone() if isinstance(leaf, Tensor) else leaf

    try:
        return pytree.tree_map(resize, batch)
    except RuntimeError as error:
        raise UsageError(f"--global-batch {rows}: a batch of that size does not fit here ({error}); let {spec} build it on the meta device") from error
