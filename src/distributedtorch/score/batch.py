"""From a batch to the output and the target of a model: tuples, dicts, or the user's own `step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from distributedtorch.core.errors import UsageError, explain
from distributedtorch.score.figure import length

Step = Callable[[nn.Module, Any], tuple[Any, Any]]
"""From the model and a batch to (output, target)."""

_STEP = "pass step=lambda model, batch: (output, target)"


def forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Output and target of an (input, target) batch, or of a dict with labels (`model(**batch)`), beside the model."""
    batch = _beside(model, batch)
    if isinstance(batch, Mapping):
        output, target = model(**batch), batch.get("labels")
        if target is None:
            raise UsageError(explain(f"a batch with the keys {sorted(batch)}", "a key 'labels'", _STEP))
        return _logits(output), target
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return _logits(model(batch[0])), batch[1]
    seen = f"a batch that is a {type(batch).__name__}"
    seen += f" of {len(batch)} things" if isinstance(batch, list | tuple) else ""
    raise UsageError(explain(seen, "(input, target), or a dict with labels for model(**batch)", _STEP))


def pair(step: Step, model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """What `step` gives, checked: two things of the same length."""
    result = step(model, batch)
    if not isinstance(result, tuple) or len(result) != 2:
        raise UsageError(explain(f"step gave a {type(result).__name__}", "a tuple (output, target)", _STEP))
    output, target = result
    rows = length(output), length(target)
    if None not in rows and rows[0] != rows[1]:
        raise UsageError(
            explain(
                f"an output of {rows[0]} rows and a target of {rows[1]}",
                "one output row per target row",
                "drop no rows and add none in the model, or give step= that returns both alike",
            )
        )
    return output, target


def _logits(output: Any) -> Any:
    """The logits of a Hugging Face output; anything else as it is."""
    return output if isinstance(output, Tensor) else getattr(output, "logits", output)


def _beside(model: nn.Module, batch: Any) -> Any:
    """The batch on the model's device: moved there from the host, refused from elsewhere."""
    own = {parameter.device for parameter in model.parameters()}
    given = {leaf.device for leaf in _tensors(batch)}
    if len(own) != 1 or not given - own:
        return batch
    device = next(iter(own))
    strange = sorted(str(one) for one in given - own if one.type != "cpu")
    if strange:
        other = strange[0]
        move = f'step=lambda model, batch: (model(batch[0].to("{device}")), batch[1].to("{device}"))'
        raise UsageError(
            explain(f"the model is on {device}, the data on {other}", "both on one device", f"pass {move}")
        )
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def _tensors(batch: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
