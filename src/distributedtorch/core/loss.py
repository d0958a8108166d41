"""What autograd recorded about the loss: refuses what is no mean over rows, counts what a mean is over.

The mean over ranks is the result of one process for means over rows, for sums of such means, and for functions of the
parameters alone. The graph is read from its end: how numbers were reduced, added, multiplied and divided, the
reduction of torch's own losses, ignored targets, class weights. A tensor has rows where its first dimension is as long
as this rank's part of the batch. A sum divided by something is taken for a mean made by hand, and so is a sum times
one over its rows; negated, or times any other number, it is a sum. Where the graph does not tell, nothing is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.graph import (
    VIEW,
    Link,
    constant_of,
    constants_of,
    dims_of,
    parents_of,
    pieces_of,
    shape_of,
    shapes_of,
    sizes_of,
    stem_of,
)

_MEAN, _SUM = 1, 2
_STEPS = 256
"""Nodes looked at in one backward, at most."""
_DEPTH = 8
_ADD = {"Add", "Sub", "Rsub"}
_SAME = {*VIEW, "ToCopy", "Clone", "Alias", "Neg"}
_LINEAR = {*_ADD, *_SAME, "Mul", "Div", "T", "MaskedFill", "Where", "Slice"}
_BEND = {"Sqrt", "Rsqrt", "Log", "Log2", "Log10", "Log1P", "Pow", "Exp", "Expm1", "Exp2", "Reciprocal"} | {
    *("Sigmoid", "Tanh", "Softplus", "LogSigmoid")
}
_EACH = {*_LINEAR, *_BEND, "Abs", "Relu", "Clamp", "ClampMin", "ClampMax", "LeakyRelu", "Elu", "Gelu", "Silu"}
_OF_ALL = {"LinalgVectorNorm", "Norm", "Std", "Var", "Max", "Min", "Prod", "Median", "Nanmedian", "Logsumexp"}
_CONTRACT = {"Dot", "Bmm", "Mm", "Mv"}
_BLINDING = {"Bmm", "Baddbmm", "Mv", "Dot", "Logsumexp", "ScatterAdd", "IndexAdd", "Cdist"}
_PICK = {"Embedding", "Index", "IndexSelect", "Gather", "MaskedSelect"}


class Kind(Enum):
    """What a value is over the rows of a batch."""

    FREE = "a function of parameters alone"
    MEAN = "a mean over rows"
    SUM = "a sum over rows"
    HAND = "a sum over rows divided by a number"
    MAYBE = "a sum, most likely over rows"
    OPEN = "not reduced over rows"
    BLIND = "not to be told"


_CERTAIN = (Kind.MEAN, Kind.SUM, Kind.HAND)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the means of a loss are over on this rank."""

    kept: float | None = None
    """Targets that count in torch's mean losses over classes; None where torch records none."""
    counts: tuple[float, ...] = ()
    """How many values each other mean is over."""


def read(roots: Sequence[Tensor], world: int, rows: int) -> Seen:
    """Look at the losses a backward begins at. `rows`: of this rank in the present batch; 0 where nobody knows.

    Raises:
        UsageError: A loss is not what the mean over ranks can be exact for.
    """
    if world == 1:
        return Seen()
    reader = _Reader(rows)
    for root in roots:
        if root.grad_fn is not None and root.numel() == 1:
            reader.root, reader.over, reader.mixed = root.grad_fn, (), False
            if reader.number((root.grad_fn, root.output_nr)) in (Kind.SUM, Kind.MAYBE):
                raise UsageError(_mixed(reader.over) if reader.mixed else _summed(root.grad_fn, reader.over))
    return Seen(kept=sum(reader.kept) if reader.kept else None, counts=tuple(reader.counts))


def over_rows(loss: Tensor, rows: int) -> Kind:
    """What a loss is, as far as its graph tells."""
    return Kind.BLIND if loss.grad_fn is None else _Reader(rows).number((loss.grad_fn, loss.output_nr))


class _Reader:
    """One walk from the end of a graph."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.left = _STEPS
        self.kept: list[float] = []
        self.counts: list[float] = []
        self.root: Any = None
        self.over: tuple[int, ...] = ()
        """The shape of what was summed last."""
        self.mixed = False
        """Whether a sum over rows was added to something else."""
        self.summing = False
        """Whether the tensor that is looked at will be summed, so that its constant factors matter."""

    # Numbers.

    def number(self, link: Link) -> Kind:
        """What a value of one number is."""
        node, _ = link
        stem, reduction = stem_of(node), getattr(node, "_saved_reduction", 0)
        self.left -= 1
        if self.left < 0:
            return Kind.BLIND
        if reduction in (_MEAN, _SUM):
            return self._loss(node, stem, reduction)
        if stem in _ADD:
            return self._joined(self._addends(link))
        if stem in _SAME:
            return self.number(parents_of(node)[0])
        if stem in _BEND:
            return self._bent(node, stem)
        if stem in _OF_ALL:
            return self._of_all(node, stem)
        if stem in _CONTRACT:
            return self._contracted(node)
        return self._reduced_or_scaled(node, stem)

    def _reduced_or_scaled(self, node: Any, stem: str) -> Kind:
        if stem == "Mul":
            return self._product(node)
        if stem == "Div":
            return self._quotient(node)
        if stem in ("Sum", "Mean"):
            return self._reduced(node, stem)
        return self._leaf(node) if stem == "" else Kind.BLIND

    def _loss(self, node: Any, stem: str, reduction: int) -> Kind:
        """One of torch's own losses."""
        parents = parents_of(node)
        if all(self.tensor(parent) is Kind.FREE for parent in parents):
            return Kind.FREE
        shape = shape_of(parents[0])
        if reduction == _SUM:
            self.over = shape
            return Kind.SUM
        if stem.startswith("NllLoss"):
            self.kept.append(float(node._saved_total_weight))
            return Kind.MEAN
        self.counts.append(float(math.prod(shape)))
        return Kind.MEAN if self._like(shape) else Kind.BLIND

    def _addends(self, link: Link) -> Iterator[Link]:
        left = [link]
        while left:
            node, number = left.pop()
            self.left -= 1
            if self.left > 0 and stem_of(node) in _ADD:
                left += parents_of(node)[::-1]
            else:
                yield node, number

    def _joined(self, links: Iterable[Link]) -> Kind:
        """What a sum of numbers is."""
        found = [(link, self.number(link)) for link in links]
        kinds = {kind for _, kind in found} - {Kind.FREE}
        if self._all_rows([link for link, _ in found]):
            self.over, kinds = (self.rows,), {Kind.SUM}
        if Kind.SUM in kinds:
            self.mixed = self.mixed or bool(kinds & {Kind.MEAN, Kind.HAND, Kind.BLIND})
            return Kind.SUM
        if not kinds:
            return Kind.FREE
        if kinds == {Kind.MEAN, Kind.HAND}:
            return Kind.HAND
        return kinds.pop() if len(kinds) == 1 else Kind.BLIND

    def _all_rows(self, links: list[Link]) -> bool:
        """Whether each of these is about one row, and all rows are there."""
        if self.rows < 2 or len(links) < self.rows:
            return False
        return len({self._row(link) for link in links} - {None}) == self.rows

    def _row(self, link: Link) -> int | None:
        """The row that was taken out of a tensor for this number."""
        for _ in range(_DEPTH):
            parents = parents_of(link[0])
            if len(parents) != 1:
                return None
            link = parents[0]
            node, number = link
            stem, shape = stem_of(node), shape_of(link)
            if stem not in ("Unbind", "Select", "Slice"):
                continue
            inner = shape[1:] if stem == "Slice" else shape
            whole = len(node._input_metadata) if stem == "Unbind" else (sizes_of(node) or (0,))[0]
            if dims_of(node, len(inner) + 1) != (0,) or (stem == "Slice" and shape[0] != 1):
                continue
            if whole != self.rows or inner[:1] == (self.rows,):
                return None
            return number if stem == "Unbind" else int(node._saved_index if stem == "Select" else node._saved_start)
        return None

    def _product(self, node: Any) -> Kind:
        kinds = [self.number(parent) for parent in parents_of(node)]
        if len(kinds) == 1:
            by_hand = kinds[0] in (Kind.SUM, Kind.MAYBE) and self._over_rows(constant_of(node))
            return kinds[0] if not by_hand else Kind.HAND if kinds[0] is Kind.SUM else Kind.BLIND
        if Kind.FREE in kinds:
            return kinds[1 - kinds.index(Kind.FREE)]
        if all(one in _CERTAIN for one in kinds):
            raise UsageError(_not_a_mean("a product of two reductions over rows"))
        return Kind.SUM if Kind.SUM in kinds else Kind.BLIND

    def _quotient(self, node: Any) -> Kind:
        above, below = (*node.next_functions, (None, 0))[:2]
        upper = self.number(above) if above[0] is not None else Kind.FREE
        if below[0] is None:
            if upper not in (Kind.SUM, Kind.MAYBE):
                return upper
            value = constant_of(node)
            self.counts += [] if value is None else [value]
            return Kind.HAND if upper is Kind.SUM else Kind.BLIND
        lower = self.number(below)
        if lower in _CERTAIN and upper in (*_CERTAIN, Kind.FREE):
            raise UsageError(_not_a_mean("divided by a reduction over rows"))
        return upper if lower is Kind.FREE and upper in (Kind.FREE, Kind.MEAN, Kind.HAND) else Kind.BLIND

    def _bent(self, node: Any, stem: str) -> Kind:
        inner = self.number(parents_of(node)[0])
        if inner is Kind.FREE or getattr(node, "_saved_exponent", None) == 1:
            return inner
        if inner in _CERTAIN:
            raise UsageError(_not_a_mean(f"{stem.lower()} of {inner.value}"))
        return Kind.BLIND

    def _of_all(self, node: Any, stem: str) -> Kind:
        """A norm, a spread or an extreme of all numbers of a tensor."""
        parent = parents_of(node)[0]
        shape = shape_of(parent)
        pieces = pieces_of(parent)
        if pieces is not None:
            return Kind.FREE if all(self.number(one) is Kind.FREE for one in pieces) else Kind.BLIND
        inner, dims = self.tensor(parent), dims_of(node, len(shape))
        if inner is Kind.OPEN and self._exact(shape) and (dims is None or 0 in dims):
            raise UsageError(_not_a_mean(f"one {stem.removeprefix('LinalgVector').lower()} of all rows"))
        return Kind.FREE if inner is Kind.FREE else Kind.BLIND

    def _contracted(self, node: Any) -> Kind:
        """A product of tensors that has come to one number (dot, einsum)."""
        parents = parents_of(node)
        if all(self.tensor(one) is Kind.FREE for one in parents) and len(parents) == len(node.next_functions):
            return Kind.FREE
        shapes = [shape for parent in parents for shape in shapes_of(parent) if self._exact(shape)]
        if not shapes:
            return Kind.BLIND
        self.over = shapes[0]
        return Kind.BLIND if len(parents) == 1 and self._are_shares(node) else Kind.SUM

    def _are_shares(self, node: Any) -> bool:
        """Whether the constant factor of a product of tensors makes a mean of it."""
        given = constants_of(node)
        if given is None or not given.is_floating_point():
            return given is None
        low, high, total = (float(value) for value in (given.min(), given.max(), given.sum()))
        return math.isclose(total, 1.0, rel_tol=1e-5) or (low == high and self._over_rows(low))

    def _reduced(self, node: Any, stem: str) -> Kind:
        """A sum or mean of all numbers of a tensor."""
        sizes, parent = sizes_of(node), node.next_functions[0]
        if not sizes:
            return Kind.BLIND if sizes is None else self.number(parent)
        pieces = pieces_of(parent)
        if pieces is not None:
            joined = self._joined(pieces)
            return Kind.MEAN if stem == "Mean" and self._all_rows(pieces) else joined
        self.summing = stem == "Sum"
        inner, dims = self.tensor(parent), dims_of(node, len(sizes))
        if inner in (Kind.FREE, *_CERTAIN):
            self.over = sizes
            return inner
        if dims is not None and 0 not in dims:
            return Kind.BLIND
        if stem == "Sum":
            self.over = sizes
            if inner is Kind.BLIND:
                return Kind.MAYBE if node is self.root else Kind.BLIND
            return Kind.SUM if self._exact(sizes) else Kind.MAYBE
        self.counts.append(float(math.prod(sizes)))
        return Kind.MEAN if inner is Kind.OPEN and self._like(sizes) else Kind.BLIND

    # Tensors.

    def tensor(self, link: Link, depth: int = 0) -> Kind:
        """What a tensor is whose numbers are still to be reduced."""
        node, _ = link
        stem = stem_of(node)
        self.left -= 1
        if stem == "":
            return self._leaf(node)
        if self.left < 0 or depth > _DEPTH:
            return Kind.BLIND
        if stem in ("Sum", "Mean"):
            return self._along(node, stem, depth)
        if stem in _EACH:
            return self._each(link, stem, depth)
        return self._layer(link, stem, depth)

    def _leaf(self, node: Any) -> Kind:
        return Kind.FREE if isinstance(getattr(node, "variable", None), nn.Parameter) else Kind.OPEN

    def _each(self, link: Link, stem: str, depth: int) -> Kind:
        """Element by element; a function of parameters that rows have made larger is one of rows."""
        parents = parents_of(link[0])
        kinds = {self.tensor(parent, depth + 1) for parent in parents}
        if kinds == {Kind.FREE}:
            grown = math.prod(shape_of(link)) > max(math.prod(shape_of(parent)) for parent in parents)
            return Kind.OPEN if grown and stem != "Slice" else Kind.FREE
        kinds -= {Kind.FREE}
        only = kinds.pop() if len(kinds) == 1 else Kind.BLIND
        if stem in ("Mul", "Div") and (len(parents) > 1 or self._divides(link, stem)):
            return only if only is Kind.OPEN and len(parents) > 1 else Kind.BLIND
        return only if only is Kind.OPEN or stem in _LINEAR else Kind.BLIND

    def _divides(self, link: Link, stem: str) -> bool:
        """Whether the constants a tensor is multiplied or divided by may make a mean of its sum."""
        if not self.summing:
            return False
        number = constant_of(link[0])
        if number is not None:
            self.over = shape_of(link)
            return number == 0 or self._over_rows(1 / number if stem == "Div" else number)
        given = constants_of(link[0])
        return given is not None and given.is_floating_point() and int((given.abs() >= 1).sum()) < 2

    def _along(self, node: Any, stem: str, depth: int) -> Kind:
        """Summed or averaged along some dimensions."""
        sizes = sizes_of(node)
        if sizes is None:
            return Kind.BLIND
        dims, inner = dims_of(node, len(sizes)), self.tensor(node.next_functions[0], depth + 1)
        if inner in (Kind.FREE, *_CERTAIN) or (dims is not None and 0 not in dims):
            return inner
        if dims is None or inner is not Kind.OPEN:
            return Kind.BLIND
        if stem == "Mean":
            return Kind.MEAN if not self.rows or sizes[0] % self.rows == 0 else Kind.BLIND
        return Kind.SUM if self._exact(sizes) and self.rows not in sizes[1:] else Kind.BLIND

    def _layer(self, link: Link, stem: str, depth: int) -> Kind:
        """Anything else: of parameters alone where nothing else goes in."""
        node, _ = link
        parents, shape = parents_of(node), shape_of(link)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return Kind.BLIND
        if stem not in _PICK and len(parents) == len(node.next_functions):
            kinds = {self.tensor(parent, depth + 3) for parent in parents}
            if kinds == {Kind.FREE}:
                return Kind.FREE
        inner = getattr(node, "_saved_mat2_sym_sizes", ())[:1]
        along = 0 in (dims_of(node, len(shape) or 1) or ()) or self._exact(tuple(inner))
        return Kind.BLIND if stem in _BLINDING or along else Kind.OPEN

    # Rows.

    def _exact(self, shape: tuple[int, ...]) -> bool:
        return self.rows > 1 and shape[:1] == (self.rows,)

    def _like(self, shape: tuple[int, ...]) -> bool:
        return self.rows > 1 and bool(shape) and shape[0] > 0 and shape[0] % self.rows == 0

    def _over_rows(self, factor: float | None) -> bool:
        """Whether a factor of a sum is most likely one over its rows, times some plainer number."""
        if factor is None or not self.over or self.over[0] == 1:
            return True
        first, *rest = self.over
        sizes = {first * math.prod(some) for n in range(len(rest) + 1) for some in combinations(rest, n)}
        made = [abs(factor) * size for size in sizes]
        if any(math.isclose(one, plain, rel_tol=1e-5) for one in made for plain in (0.5, 1.0)):
            return True
        return abs(factor) < 1.0 and any(_digits(one) < _digits(factor) for one in made)


def _digits(value: float) -> int:
    """Significant decimal digits."""
    return len(f"{abs(value):.6g}".split("e")[0].replace(".", "").strip("0"))


_DO = "loss / n for a mean over the n rows here, or loss = dt.weight(loss, n, sum=True) to train on the sum over all"


def _summed(node: Any, shape: tuple[int, ...]) -> str:
    of = f", of a tensor of shape {shape}" if shape else ""
    return explain(
        f"the loss is a sum over rows ({node.name()}{of})",
        "a mean over samples: a sum would grow with the batch and shrink with the number of ranks",
        f"reduction='mean', or {_DO}",
    )


def _mixed(shape: tuple[int, ...]) -> str:
    of = f" (of a tensor of shape {shape})" if shape else ""
    return explain(
        f"the loss adds a sum over rows{of} to something else",
        "means over samples only: a sum would shrink with the number of ranks, and a mean would not",
        "divide the sum by the n rows here; where all addends are sums, loss = dt.weight(loss, n, sum=True)",
    )


def _not_a_mean(form: str) -> str:
    return explain(
        f"the loss is not a mean over rows, nor a sum of such means: {form}",
        "a mean over samples: each rank would take the root, log, power, product or ratio of its own rows' value only",
        "apply it to each sample, before the mean; or leave it out (the root or log of a loss has the same minimum)",
    )


def refuse_ones(root: Tensor, gradient: Tensor | None, rows: int) -> None:
    """Refuse a backward of one loss per row that counts each of them in full: that is their sum."""
    by_row = root.dim() > 0 and root.numel() > 1 and rows > 1 and root.shape[0] == rows
    if by_row and gradient is not None and gradient.shape == root.shape and bool((gradient == 1).all()):
        raise UsageError(_summed(root.grad_fn, tuple(root.shape)))
