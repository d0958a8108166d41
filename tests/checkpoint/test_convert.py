"""Converting: weights out and back, others' checkpoints in and gone on with; whatever a file holds, nothing runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import struct
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.checkpoint import archive, dcp, foreign, portable
from distributedtorch.cli import main
from distributedtorch.core.errors import CheckpointError
from distributedtorch.distribute import release
from tests.checkpoint import dcp_job, job


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    release()


def convert(*words: object) -> int:
    return main(["convert", *map(str, words)])


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(dcp_job.batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def loaded(path: Path, make: Callable[[nn.Module], torch.optim.Optimizer] = adam) -> tuple[Any, Any]:
    """A model of other values, with what a checkpoint holds loaded into it."""
    model = dcp_job.build()
    nn.init.zeros_(model[0].weight)  # type: ignore[arg-type]
    model, optimizer = dt.distribute(model, make(model))
    dt.load(path)
    return model, optimizer


# Out.


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of ours with tied weights, and what it holds."""
    folder = tmp_path_factory.mktemp("ours")
    training = job.Training("ddp")
    training.epoch()
    dt.save(folder / "saved")
    state = {name: value.clone() for name, value in training.model.state_dict().items()}
    release()
    return folder / "saved", state


def test_to_one_file_and_back(ours: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, state = ours
    file = tmp_path / "model.safetensors"
    assert convert(source, file) == 0
    said = capsys.readouterr().out
    assert "Net, step 8" in said and "tied.weight is tied to first.weight" in said
    written = load_file(file)
    assert written.keys() == state.keys() - {"tied.weight"}
    assert all(torch.equal(written[name], state[name]) for name in written)
    assert convert(newest(source), file) == 2
    assert "is there already" in capsys.readouterr().err
    with torch.device("meta"):
        net = job.Net().double()
    net.whole, net.part = torch.arange(8.0).double(), torch.arange(2.0, 5.0).double()
    net = dt.distribute(net, weights=file)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def newest(folder: Path) -> Path:
    return max(path for path in folder.iterdir() if path.is_dir())


@pytest.mark.parametrize(("size", "files"), [("5GB", 1), ("20KB", 7)])
def test_to_hugging_face(tmp_path: Path, size: str, files: int) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=32)
    torch.manual_seed(0)
    model = dt.distribute(GPT2LMHeadModel(config).eval())
    dt.save(tmp_path / "saved")
    target = tmp_path / "hf"
    config.save_pretrained(target)
    assert convert(tmp_path / "saved", target, "--to", "hf", "--max-shard", size) == 0
    shards = sorted(path.name for path in target.glob("*.safetensors"))
    if files == 1:
        assert shards == ["model.safetensors"]
    else:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert len(shards) > 1 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
        assert "lm_head.weight" not in index["weight_map"] and set(index["weight_map"].values()) == set(shards)
    again, info = GPT2LMHeadModel.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert again.lm_head.weight is again.transformer.wte.weight
    words = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(again.eval()(words).logits, model(words).logits)
    assert convert(tmp_path / "saved", target, "--to", "hf") == 2


def test_a_changed_byte_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dt.distribute(dcp_job.build())
    dt.save(tmp_path / "saved")
    file = next((tmp_path / "saved").rglob("model-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    assert convert(tmp_path / "saved", tmp_path / "out.safetensors") == 2
    assert "has changed since it was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


# In, and on.


@pytest.mark.parametrize("names", [("model", "optimizer"), ("model_state_dict", "optimizer_state_dict")])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_torch_save_goes_on_bit_for_bit(
    tmp_path: Path, names: tuple[str, str], prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = dcp_job.build()
    optimizer = adam(model)
    trained(model, optimizer, range(3))
    state = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    torch.save({names[0]: state, names[1]: optimizer.state_dict(), "epoch": 1}, tmp_path / "saved.pt")
    assert convert(tmp_path / "saved.pt", tmp_path / "ours") == 0
    said = capsys.readouterr().out
    assert "optimizer state of 4 parameters, step 3" in said and "left out: epoch" in said
    assert ("prefix 'module.'" in said) == bool(prefix)
    expected = trained(model, optimizer, range(3, 6))
    assert trained(*loaded(tmp_path / "ours"), range(3, 6)) == expected
    assert convert(tmp_path / "saved.pt", tmp_path / "ours") == 2
    assert "holds checkpoints already" in capsys.readouterr().err


def groups(model: nn.Module) -> torch.optim.Optimizer:
    wide = [p for p in model.parameters() if p.dim() > 1]
    narrow = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW([{"params": narrow, "weight_decay": 0.0}, {"params": wide}], lr=0.01)


def test_groups_and_scheduler(tmp_path: Path) -> None:
    model = dcp_job.build()
    optimizer = groups(model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2], 0.5)
    trained(model, optimizer, range(3))
    for _ in range(3):
        scheduler.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()},
        tmp_path / "saved.pt",
    )
    assert convert(tmp_path / "saved.pt", tmp_path / "ours") == 0
    expected = trained(model, optimizer, range(3, 6))
    again = dcp_job.build()
    theirs = groups(again)
    again, theirs, milestones = dt.distribute(again, theirs, torch.optim.lr_scheduler.MultiStepLR(theirs, [9]))
    dt.load(tmp_path / "ours")
    assert milestones.get_last_lr() == [0.005, 0.005]
    assert trained(again, theirs, range(3, 6)) == expected


def test_what_cannot_be_matched_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    parts = list(model.parameters())
    some = torch.optim.AdamW(parts[:3])
    mixed = torch.optim.AdamW([{"params": parts[2:]}, {"params": parts[:2]}])
    model(torch.ones(2, 5)).sum().backward()
    for optimizer, said in ((some, "numbers 3 parameters, the model's state has 4"), (mixed, "shapes do not tell")):
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
        assert convert(tmp_path / "saved.pt", tmp_path / "ours") == 2
        assert said in capsys.readouterr().err
    named = torch.optim.AdamW([{"params": list(model.named_parameters())[n:][:2]} for n in (2, 0)])
    named.step()
    torch.save({"model": model.state_dict(), "optimizer": named.state_dict()}, tmp_path / "saved.pt")
    assert convert(tmp_path / "saved.pt", tmp_path / "ours") == 0
    assert convert(tmp_path / "saved.pt", tmp_path / "alone", "--no-optimizer") == 0


def test_plain_state_with_tied_buffers_and_types(tmp_path: Path) -> None:
    net = job.Net()
    torch.save(net.state_dict(), tmp_path / "saved.pt")
    assert convert(tmp_path / "saved.pt", tmp_path / "ours") == 0
    other = dt.distribute(job.Net())
    dt.load(tmp_path / "ours")
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in other.state_dict().items())
    kinds = {str(n): torch.ones(3, 2, dtype=dtype) for n, dtype in enumerate([torch.bfloat16, torch.float8_e4m3fn])}
    kinds |= {"empty": torch.empty(0, 4), "t": torch.arange(6).view(2, 3).t(), "p": nn.Parameter(torch.ones(2))}
    torch.save(kinds, tmp_path / "kinds.pt")
    assert convert(tmp_path / "kinds.pt", tmp_path / "kinds.safetensors") == 0
    written = load_file(tmp_path / "kinds.safetensors")
    assert all(torch.equal(written[n].double(), v.detach().double()) for n, v in kinds.items())


def test_weights_with_a_name_tied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {n: v for n, v in job.Net().state_dict().items() if n not in ("tied.weight", "part")}
    save_file(state, tmp_path / "w.safetensors")
    assert convert(tmp_path / "w.safetensors", tmp_path / "x", "--tie", "tied.weight=nothing") == 2
    assert "--tie tied.weight=nothing" in capsys.readouterr().err
    assert convert(tmp_path / "w.safetensors", tmp_path / "ours", "--tie", "tied.weight=first.weight") == 0


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DCP's folders of a fully_shard model, written by two processes."""
    folder = tmp_path_factory.mktemp("dcp")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, dcp_job.__file__, str(folder)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.parametrize("kind", ["nested", "flat"])
def test_dcp(sharded: Path, tmp_path: Path, kind: str) -> None:
    assert len(list((sharded / kind).glob("*.distcp"))) == 2
    assert convert(sharded / kind, tmp_path / "ours") == 0
    model, optimizer = loaded(tmp_path / "ours")
    have = dict(model.state_dict())
    for name, param in model.named_parameters():
        have |= {f"{name}/{key}": value for key, value in optimizer.state[param].items()}
    expected = load_file(sharded / "expected.safetensors")
    assert have.keys() == expected.keys()
    assert all(torch.equal(have[name], expected[name]) for name in have)
    assert float(have["0.weight/step"]) == dcp_job.STEPS


@dataclass
class fragment_address:
    """Pickled under DeepSpeed's name."""

    numel: int
    start: int


@pytest.fixture
def as_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "deepspeed.utils.tensor_fragment"
    monkeypatch.setattr(fragment_address, "__module__", name)
    module = types.ModuleType(name)
    module.fragment_address = fragment_address  # type: ignore[attr-defined]
    for package in ("deepspeed", "deepspeed.utils"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setitem(sys.modules, name, module)


def in_zero2(values: dict[str, Tensor], rank: int, ranks: int) -> tuple[Tensor, dict[str, fragment_address]]:
    """All values in a row, this rank's equal part of it, and which fragments lie there."""
    row = torch.cat([value.reshape(-1) for value in values.values()])
    length = -(-row.numel() // ranks)
    low, at, mine = rank * length, 0, {}
    for name, value in values.items():
        start, stop = max(at, low), min(at + value.numel(), low + length)
        if start < stop:
            mine[name] = fragment_address(numel=stop - start, start=start - low)
        at += value.numel()
    return torch.cat([row, torch.zeros(ranks)])[low : low + length], mine


def in_zero3(values: dict[str, Tensor], rank: int, ranks: int) -> tuple[Tensor, None]:
    """This rank's equal part of every value."""
    parts = []
    for value in values.values():
        length = -(-value.numel() // ranks)
        parts.append(torch.cat([value.reshape(-1), torch.zeros(ranks)])[rank * length : (rank + 1) * length])
    return torch.cat(parts), None


def zero_files(folder: Path, stage: int, ranks: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The files that DeepSpeed would write; benchmarks/convert_deepspeed.py has those that it wrote."""
    (folder / "global_step3").mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    params = dict(model.named_parameters())
    moments = {key: {n: optimizer.state[p][key] for n, p in params.items()} for key in ("exp_avg", "exp_avg_sq")}
    cut = in_zero3 if stage == 3 else in_zero2
    for rank in range(ranks):
        master, mapping = cut({n: p.detach() for n, p in params.items()}, rank, ranks)
        state = {key: cut(values, rank, ranks)[0] for key, values in moments.items()}
        options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        base = {"state": {0: {"step": torch.tensor(3.0), **state}}, "param_groups": [{**options, "params": [0]}]}
        said: dict[str, Any] = {"zero_stage": stage, "partition_count": ranks}
        said |= {"fp32_flat_groups": [master], "optimizer_state_dict": base}
        if stage < 3:
            said = {"zero_stage": stage, "partition_count": [ranks], "param_slice_mappings": [mapping]}
            said |= {"single_partition_of_fp32_groups": [master], "base_optimizer_state": base}
        start = folder / "global_step3" / f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": said}, f"{start}_optim_states.pt")
        whole = {n: torch.empty(0) if stage == 3 else p.detach().bfloat16() for n, p in params.items()}
        shapes = [{n: p.shape for n, p in params.items()}]
        if stage == 3 or rank == 0:
            name = f"{start}_model_states.pt" if stage == 3 else folder / "global_step3/mp_rank_00_model_states.pt"
            torch.save({"module": whole, "param_shapes": shapes, "global_steps": 3, "ds_version": "0"}, name)


@pytest.mark.usefixtures("as_deepspeed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(tmp_path: Path, stage: int, capsys: pytest.CaptureFixture[str]) -> None:
    model = dcp_job.build()
    optimizer = adam(model)
    trained(model, optimizer, range(3))
    zero_files(tmp_path / "zero", stage, 3, model, optimizer)
    assert convert(tmp_path / "zero", tmp_path / "ours") == 0
    assert f"ZeRO {stage}): 4 tensors, 66 elements, optimizer state of 4 parameters, step 3" in capsys.readouterr().out
    expected = trained(model, optimizer, range(3, 6))
    assert trained(*loaded(tmp_path / "ours"), range(3, 6)) == expected
    for path in (tmp_path / "zero" / "global_step3").glob("zero_pp_rank_2_*"):
        path.unlink()
    assert convert(tmp_path / "zero", tmp_path / "part") == 2
    assert "optimizer files of 2 ranks, 3 wrote it" in capsys.readouterr().err


# Files that mean harm.


class Payload:
    """Pickled as a call."""

    def __init__(self, call: Any, *args: object) -> None:
        self.call = call, args

    def __reduce__(self) -> Any:
        return self.call


PLACES: dict[str, Callable[[Any], Any]] = {
    "alone": lambda bad: bad,
    "as a value": lambda bad: {"model": {"a": torch.ones(2)}, "other": bad},
    "in the model": lambda bad: {"model": {"a": torch.ones(2), "b": bad}},
    "in the optimizer": lambda bad: {"model": {"a": torch.ones(2)}, "optimizer": {"state": {0: {"step": bad}}}},
    "in a list": lambda bad: {"model": {"a": torch.ones(2)}, "x": [1, (2, {"y": bad})]},
    "as a key": lambda bad: {"model": {"a": torch.ones(2)}, "x": {bad: 1}},
    "in a set": lambda bad: {"model": {"a": torch.ones(2)}, "x": {bad}},
}


@pytest.mark.parametrize("where", PLACES)
def test_nothing_in_torch_save_runs(tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "ran"
    torch.save(PLACES[where](Payload(os.system, f"touch {mark}")), tmp_path / "bad.pt")
    assert convert(tmp_path / "bad.pt", tmp_path / "ours") == 2
    said = capsys.readouterr().err
    assert f"{os.system.__module__}.system" in said and "do:" in said
    assert not mark.exists() and not (tmp_path / "ours").exists()


def test_the_payload_would_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    pickle.loads(pickle.dumps(Payload(os.system, f"touch {mark}")))
    assert mark.exists()


@pytest.mark.parametrize(
    ("call", "args", "named"),
    [
        (eval, ("1",), "builtins.eval"),
        (getattr, (1, "real"), "builtins.getattr"),
        (torch.load, ("x",), "torch.serialization.load"),
        (torch.hub.load, ("x",), "torch.hub.load"),
        (subprocess.Popen, ("x",), r"\.Popen"),
        (Payload, (1,), "Payload"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_other_names_are_named(call: Any, args: tuple[Any, ...], named: str, protocol: int) -> None:
    data = pickle.dumps({"x": Payload(call, *args)}, protocol=protocol)
    with pytest.raises(CheckpointError, match=named.replace("builtins", ".*")):
        foreign.read(data, "it")


def test_nothing_in_dcp_metadata_runs(sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "dcp").mkdir()
    good = pickle.loads((sharded / "nested" / ".metadata").read_bytes())
    bad = Payload(os.system, f"touch {mark}")
    for part in ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"):
        old = getattr(good, part)
        setattr(good, part, bad if not isinstance(old, dict) else {**old, "x": bad})
        (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(good))
        setattr(good, part, old)
        assert convert(tmp_path / "dcp", tmp_path / "ours") == 2
        assert f"{os.system.__module__}.system" in capsys.readouterr().err
    assert not mark.exists()


def test_dcp_metadata_that_lies(sharded: Path, tmp_path: Path) -> None:
    good = pickle.loads((sharded / "nested" / ".metadata").read_bytes())
    folder = tmp_path / "dcp"
    folder.mkdir()
    for file in (sharded / "nested").glob("*.distcp"):
        (folder / file.name).write_bytes(file.read_bytes())
    name, one = next((n, m) for n, m in good.state_dict_metadata.items() if n.endswith("0.weight"))
    infos = [info for key, info in good.storage_data.items() if key.fqn == name]

    def refused(said: str) -> None:
        (folder / ".metadata").write_bytes(pickle.dumps(good))
        with pytest.raises(CheckpointError, match=said):
            dcp.load(folder)

    size, one.size = one.size, torch.Size([1 << 40, 1 << 20])
    refused("in .* bytes")
    one.size = torch.Size([size[0] + 1, size[1]])
    refused("leave gaps")
    one.size = size
    for path in ("../secret", "/etc/passwd", "a/b"):
        infos[0].relative_path, kept = path, infos[0].relative_path
        refused("file name")
        infos[0].relative_path = kept
    infos[0].offset, kept_offset = 1 << 50, infos[0].offset
    refused("ends before")
    infos[0].offset = kept_offset
    (folder / ".metadata").write_bytes(pickle.dumps(good)[:-40])
    with pytest.raises(CheckpointError, match="not a pickle"):
        dcp.load(folder)


def zipped(data: bytes, storage: bytes = b"\0" * 8, kind: int = zipfile.ZIP_STORED) -> memoryview:
    """A file as torch.save lays it out, with this pickle in it."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", kind) as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/data/0", storage)
    return memoryview(bytearray(made.getvalue()))


def tensor(numel: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """The pickle of one tensor, by hand."""
    said = pickle.dumps(("storage", 0, "0", "cpu", numel), protocol=2)[2:-1]
    said = said.replace(b"K\x00X", b"ctorch\nFloatStorage\nX", 1)
    rest = pickle.dumps((offset, shape, stride, False, None), protocol=2)[2:-2]
    inside = rest[1:] if rest[:1] == b"(" else rest
    assert b"FloatStorage" in said
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + said + b"Q" + inside.replace(b"q\x02", b"") + b"tR."


def test_sizes_are_checked_before_anything_is_allocated() -> None:
    whole = archive.load_bytes(zipped(tensor(2, 0, (2,), (1,))), "it")
    assert torch.equal(whole, torch.zeros(2))
    lies: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = [
        (1 << 50, 0, (2,), (1,)),
        (3, 0, (2,), (1,)),
        (2, 0, (1 << 50,), (1,)),
        (2, 0, (1 << 50,), (0,)),
        (2, 1, (2,), (1,)),
        (2, 0, (-2,), (1,)),
        (2, 0, (2,), (-1,)),
        (2, -1, (2,), (1,)),
        (2, 0, (1 << 40, 1 << 40), (0, 0)),
    ]
    for lie in lies:
        with pytest.raises(CheckpointError):
            archive.load_bytes(zipped(tensor(*lie)), "it")


def deep(levels: int) -> bytes:
    return b"\x80\x02" + b"]" * levels + b"a" * (levels - 1) + b"."


def shared(levels: int, kind: bytes) -> bytes:
    """Every level holds the one below twice: small to write, endless to walk through."""
    return b"\x80\x02" + b")" + (b"2" + kind) * levels + b"."


def test_pickles_that_are_no_state() -> None:
    bad = {
        "empty": b"",
        "garbage": bytes(range(256)),
        "no end": b"\x80\x02]",
        "deep": deep(100_000),
        "shared": shared(200, b"\x86"),
        "a key that takes forever to hash": b"\x80\x02}" + shared(200, b"\x86")[2:-1] + b"K\x01s.",
        "circular": b"\x80\x02]q\x00h\x00a.",
        "a text of 2**62 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
        "bytes of 2**31": b"\x80\x04B" + struct.pack("<I", (1 << 31) + 5) + b"x.",
        "a number of 2**24 bits": b"\x80\x02\x8b" + struct.pack("<i", 1 << 21) + b"\x01" * (1 << 21) + b".",
        "pop of nothing": b"0.",
        "memo of nothing": b"h\x07.",
        "mark of nothing": b"t.",
        "call of a value": b"K\x01)R.",
        "call of a type": b"cbuiltins\nint\n)R.",
        "extension": b"\x82\x01.",
        "instance": b"(ios\nsystem\n.",
        "append to a tuple": b")K\x01a.",
        "fields of a number": b"K\x01}b.",
        "persistent": b"K\x01Q.",
        "two marks": b"((((K\x01t.",
    }
    for name, data in bad.items():
        with pytest.raises(CheckpointError, match=re.escape(name)):
            foreign.read(data, name)


def test_files_that_are_cut_or_changed_anywhere(tmp_path: Path) -> None:
    model = dcp_job.build()
    torch.save({"model": model.state_dict()}, tmp_path / "saved.pt")
    good = (tmp_path / "saved.pt").read_bytes()
    assert archive.load(tmp_path / "saved.pt")["model"].keys() == model.state_dict().keys()
    for size in range(0, len(good), 37):
        with pytest.raises(CheckpointError):
            archive.load_bytes(memoryview(bytearray(good[:size])), "it")
    for at in range(0, len(good), 11):
        changed = bytearray(good)
        changed[at] ^= 0xFF
        try:
            found = archive.load_bytes(memoryview(changed), "it")
        except CheckpointError:
            continue
        assert all(torch.equal(found["model"][n], v) for n, v in model.state_dict().items()), at


def test_any_mutation_is_read_or_refused() -> None:
    """Bytes of the pickle changed, dropped, doubled: an error of ours or a state, and nothing else."""
    model = dcp_job.build()
    optimizer = adam(model)
    trained(model, optimizer, range(1))
    made = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, made)
    with zipfile.ZipFile(made) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    name = next(name for name in parts if name.endswith("data.pkl"))
    draw, refused = random.Random(0), 0
    for _ in range(300):
        data = bytearray(parts[name])
        at, length = draw.randrange(len(data)), draw.randint(1, 9)
        data[at : at + length] = draw.choice([b"", bytes([draw.randrange(256)]), data[at : at + length] * 2])
        changed = io.BytesIO()
        with zipfile.ZipFile(changed, "w") as file:
            for one, content in {**parts, name: bytes(data)}.items():
                file.writestr(one, content)
        try:
            portable.content(portable.split(archive.load_bytes(memoryview(bytearray(changed.getvalue())), "it"), "it"))
        except CheckpointError:
            refused += 1
    assert 200 < refused < 300


def test_other_formats_are_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = dcp_job.build().state_dict()
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "text.pt").write_text("nothing of the kind")
    (tmp_path / "packed.pt").write_bytes(zipped(pickle.dumps({"a": 1}), kind=zipfile.ZIP_DEFLATED))
    (tmp_path / "empty").mkdir()
    torch.save({"a": 1}, tmp_path / "number.pt")
    for name, said in (
        ("old.pt", "before torch 1.6"),
        ("text.pt", "not a whole zip"),
        ("packed.pt", "compressed"),
        ("empty", "no checkpoint that is known"),
        ("number.pt", "a model's state_dict"),
        ("missing.pt", "is not there"),
    ):
        assert convert(tmp_path / name, tmp_path / "ours") == 2
        assert said in capsys.readouterr().err, name
    assert convert(tmp_path / "old.pt", tmp_path / "x", "--max-shard", "big") == 2
