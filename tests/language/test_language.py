"""Language models: readers against direct computation, masks, the common methods on them, adapters in PEFT's format."""

from __future__ import annotations

import copy
import json
import math
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conftest import assert_close, call, failing, method_of
from fedspan import tree
from fedspan.config import assemble_data, from_dict
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError, DataError
from fedspan.language import (
    CausalLM,
    byte_tokenizer,
    encode,
    instruction_data,
    load_base,
    load_tokenizer,
    piece_tokenizer,
    read_model,
    read_pieces,
    read_records,
    save_adapter,
    save_merged,
)
from fedspan.language.instructions import NOTHING, prompt
from fedspan.learn.task import Task
from fedspan.methods import FedAvg, FedLoRA, FedLoRU, FedRep, PFedLoRU
from fedspan.models import build
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation

SIZES = {"hidden": 16, "mlp": 24, "layers": 1, "heads": 2, "kv_heads": 1}
WORDS = ("red", "green", "blue", "sun", "moon")


def records(n: int = 24) -> list[dict[str, str]]:
    rng = np.random.default_rng(0)
    return [
        {
            "instruction": f"say {WORDS[k % 5]}",
            "input": "loud" if k % 3 == 0 else "",
            "output": WORDS[k % 5] * (1 + k % 2),
        }
        for k in rng.permutation(n)
    ]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("records") / "records.json"
    file.write_text(json.dumps(records()))
    return file


@pytest.fixture(scope="module")
def data(path: Path) -> FederatedData:
    return instruction_data(str(path), byte_tokenizer(), clients=4, max_length=80)


def small_task(data: FederatedData, targets: tuple[str, ...] = ("q_proj", "v_proj")) -> Task:
    made = lambda: build("causal-lm", tuple(data.x.shape[1:]), data.classes or 0, targets=targets, **SIZES)
    return Task(made, "language", dtype=torch.float64, seed=3)


def run(method: Any, data: FederatedData, rounds: int = 4, task: Task | None = None, **settings: Any) -> Simulation:
    chosen: dict[str, Any] = {
        "participation": 0.5,
        "batch_size": 5,
        "workers": 1,
        "precision": "float64",
        "evaluate_every": 1,
        "mapping": "loop",
    } | settings
    sim = Simulation(method, task or small_task(data), data, rounds=rounds, seed=1, settings=Settings(**chosen))
    sim.result = sim.run()  # type: ignore[attr-defined]
    return sim


def loss_of(lm: Any, data: FederatedData, client: int = 0) -> float:
    """The loss per token on a client's test records, by Hugging Face's own computation."""
    rows = torch.from_numpy(data.test[client])
    x, y = data.x[rows], data.y[rows]
    with torch.no_grad():
        logits = lm(input_ids=x, use_cache=False).logits
    return float(F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=NOTHING))


# ------------------------------------------------------------------------------------------------ llama2.c


def llama2c_file(path: Path, tied: bool = True) -> dict[str, Any]:
    """A random model of that format; returns its weights as they are stored."""
    dim, hidden, layers, heads, kv_heads, vocabulary, length = 12, 10, 2, 3, 1, 20, 16
    head = dim // heads
    shapes = [(vocabulary, dim), (layers, dim), (layers, dim, dim), (layers, head, dim), (layers, head, dim)]
    shapes += [(layers, dim, dim), (layers, dim), (layers, hidden, dim), (layers, dim, hidden), (layers, hidden, dim)]
    shapes += [(dim,), (length, head // 2), (length, head // 2)] + ([] if tied else [(vocabulary, dim)])
    rng = np.random.default_rng(1)
    arrays = [rng.normal(0, 0.5, s).astype(np.float32) for s in shapes]
    header = struct.pack("<7i", dim, hidden, layers, heads, kv_heads, vocabulary if tied else -vocabulary, length)
    path.write_bytes(header + b"".join(a.tobytes() for a in arrays))
    names = ["embed", "rms_att", "wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3", "rms_final", "_", "_", "wcls"]
    held = {k: torch.from_numpy(a).double() for k, a in zip(names, arrays)}
    return held | {"heads": heads, "head": head, "wcls": held.get("wcls", held["embed"])}


def direct(w: dict[str, Any], tokens: list[int]) -> Tensor:
    """The forward pass as llama2.c does it: rotation of neighbouring pairs, one token after another."""

    def norm(x: Tensor, g: Tensor) -> Tensor:
        return g * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    def turned(v: Tensor, at: int) -> Tensor:
        v = v.clone()
        for i in range(0, v.shape[-1], 2):
            angle = at * 10000.0 ** (-i / w["head"])
            a, b = v[..., i].clone(), v[..., i + 1].clone()
            v[..., i], v[..., i + 1] = (
                a * math.cos(angle) - b * math.sin(angle),
                a * math.sin(angle) + b * math.cos(angle),
            )
        return v

    x = w["embed"][torch.tensor(tokens)]
    for l in range(len(w["wq"])):
        n = norm(x, w["rms_att"][l])
        q = torch.stack([turned((w["wq"][l] @ n[t]).reshape(w["heads"], -1), t) for t in range(len(tokens))])
        k = torch.stack([turned((w["wk"][l] @ n[t]).reshape(1, -1), t) for t in range(len(tokens))])
        v = (n @ w["wv"][l].T).reshape(len(tokens), 1, -1)
        out = torch.zeros_like(x)
        for t in range(len(tokens)):
            for h in range(w["heads"]):
                score = (k[: t + 1, 0] @ q[t, h] / w["head"] ** 0.5).softmax(0)
                out[t, h * w["head"] : (h + 1) * w["head"]] = score @ v[: t + 1, 0]
        x = x + out @ w["wo"][l].T
        n = norm(x, w["rms_ffn"][l])
        x = x + (F.silu(n @ w["w1"][l].T) * (n @ w["w3"][l].T)) @ w["w2"][l].T
    return norm(x, w["rms_final"]) @ w["wcls"].T


@pytest.mark.parametrize("tied", [True, False])
def test_a_raw_llama_gives_the_logits_of_a_direct_forward_pass(tmp_path: Path, tied: bool) -> None:
    w = llama2c_file(tmp_path / "model.bin", tied)
    tokens = [3, 7, 7, 0, 19, 4]
    with torch.no_grad():
        found = read_model(tmp_path / "model.bin").double()(torch.tensor([tokens])).logits[0]
    # The rotation's angles are float32 inside transformers, whatever the model's precision.
    assert float((found - direct(w, tokens)).abs().max()) < 1e-5


def test_a_raw_llama_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    llama2c_file(file)
    raw = file.read_bytes()
    for bad in (b"12", raw[:-4], raw + b"0000", struct.pack("<7i", 12, 10, 2, 5, 1, 20, 16) + raw[28:]):
        file.write_bytes(bad)
        with pytest.raises(DataError, match=r"llama2\.c"):
            read_model(file)


PIECES = [" ", "t", "h", "e", " t", "he", " the", "n", "then", "th", "a", "an"]


def piece_file(path: Path, pieces: list[str] = PIECES) -> None:
    first = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{i:02X}>" for i in range(256))]
    scores = [0.0] * len(first) + [-float(k) for k in range(len(pieces))]
    raw = struct.pack("<i", 9)
    for piece, score in zip([*first, *pieces], scores):
        raw += struct.pack("<fi", score, len(piece.encode())) + piece.encode()
    path.write_bytes(raw)


def joined(pieces: list[str], scores: list[float], text: str) -> list[int]:
    """Join the two neighbours that make the best piece, the first of equals, until none do."""
    at = {p: i for i, p in enumerate(pieces)}
    ids: list[int] = []
    for letter in " " + text:
        ids += [at[letter]] if letter in at else [3 + b for b in letter.encode()]
    while True:
        found = [
            (scores[at[pieces[a] + pieces[b]]], -k)
            for k, (a, b) in enumerate(pairwise(ids))
            if pieces[a] + pieces[b] in at
        ]
        if not found:
            return ids
        k = -max(found)[1]
        ids[k : k + 2] = [at[pieces[ids[k]] + pieces[ids[k + 1]]]]


def test_pieces_are_joined_best_first_and_bytes_stand_for_the_rest(tmp_path: Path) -> None:
    piece_file(tmp_path / "tok.bin")
    pieces, scores = read_pieces(tmp_path / "tok.bin")
    tokenizer = piece_tokenizer(pieces, scores)
    for text in ("then the hen", "thé ante", "\n", "the the  the", "€tea"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == joined(pieces, scores, text), text
        assert tokenizer.decode(ids) == text
    (tmp_path / "tok.bin").write_bytes((tmp_path / "tok.bin").read_bytes()[:50])
    with pytest.raises(DataError, match=r"tokenizer of llama2.c|does not fit"):
        read_pieces(tmp_path / "tok.bin")


def test_a_folder_of_llama2c_is_found_with_its_tokenizer(tmp_path: Path) -> None:
    llama2c_file(tmp_path / "model.bin")
    piece_file(tmp_path / "tok.bin")
    assert load_base(str(tmp_path)).config.vocab_size == 20
    assert len(load_tokenizer(str(tmp_path))) == 259 + len(PIECES)
    (tmp_path / "tok.bin").unlink()
    with pytest.raises(ConfigError, match=r"must hold config.json and safetensors"):
        load_base(str(tmp_path))
    with pytest.raises(ConfigError, match=r"path must be a folder or a name OWNER/NAME"):
        load_base(str(tmp_path / "nothing"))


# ------------------------------------------------------------------------------------------------ records


def test_only_the_answer_is_predicted() -> None:
    tokenizer, some = byte_tokenizer(), records(5)
    rows = encode(some, tokenizer, 200)
    for k, record in enumerate(some):
        live = rows.y[k] != NOTHING
        assert tokenizer.decode(rows.y[k][live][:-1]) == record["output"]
        assert int(rows.y[k][live][-1]) == tokenizer.eos_token_id
        start = int(live.nonzero()[0])
        assert tokenizer.decode(rows.x[k][1 : start + 1]) == prompt(record)
        both = live[:-1] & live[1:]
        assert torch.equal(rows.y[k][:-1][both], rows.x[k][1:][both])  # one token ahead


def test_long_prompts_lose_their_beginning_and_long_answers_their_end() -> None:
    tokenizer = byte_tokenizer()
    long = [
        {"instruction": "i" * 100, "input": "", "output": "o" * 100},
        {"instruction": "i" * 100, "input": "", "output": "o"},
    ]
    rows = encode(long, tokenizer, 64)
    assert rows.x.shape[1] == 63 and rows.answers.tolist() == [32, 3]  # space, o, end
    assert tokenizer.decode(rows.x[0][1:32]).endswith("### Response:\n")
    with pytest.raises(ConfigError, match="max_length must be an integer >= 8"):
        encode(long, tokenizer, 7)


def test_records_that_would_be_cut_can_be_left_out(tmp_path: Path) -> None:
    tokenizer, file = byte_tokenizer(), tmp_path / "r.json"
    told = [{"instruction": "say", "input": "", "output": "o" * k} for k in range(1, 41)]
    file.write_text(json.dumps(told))
    uncut = [encode([r], tokenizer, 512) for r in told]
    most = uncut[19].x.shape[1] + 1  # of so many tokens a record is still whole

    def made(max_length: int = most, **options: Any) -> FederatedData:
        return instruction_data(str(file), tokenizer, clients=2, max_length=max_length, **options)

    assert made().x.shape == (40, most - 1)  # the longer half is cut
    whole = made(whole_records=True)
    assert_close(whole.x, encode(told[:20], tokenizer, 512).x)
    assert_close(whole.y, encode(told[:20], tokenizer, 512).y)
    assert len(made(whole_records=True, limit=8).x) == 8  # eight whole ones, not what is whole of eight
    shortest = uncut[0].x.shape[1] + 1
    with pytest.raises(DataError, match=rf"of at most max_length = 8 tokens\. The shortest of 40 has {shortest}\."):
        made(8, whole_records=True)
    with pytest.raises(ConfigError, match="max_length must be an integer >= 8"):
        made(7, whole_records=True)


def test_whole_records_are_an_option_of_language_models_only(path: Path) -> None:
    data = {"source": str(path), "max_length": 64, "whole_records": True}
    model = {"kind": "causal-lm", "hidden": 16, "heads": 2, "kv_heads": 1}
    values: dict[str, Any] = {"data": data, "partition": {"clients": 4}, "model": model}
    config = from_dict(values)
    assert from_dict(config.to_dict()) == config and config.identity()["data"]["whole_records"]
    kept = [r for r in records() if encode([r], byte_tokenizer(), 512).x.shape[1] + 1 <= 64]
    assert 0 < len(kept) < len(records()) and len(assemble_data(config).x) == len(kept)
    usual = from_dict(values | {"data": {"source": str(path)}})
    assert "whole_records" not in usual.to_dict()["data"]  # so that runs from before it go on
    with pytest.raises(ConfigError, match="whole_records is for language models"):
        from_dict({"data": {"whole_records": True}, "model": {"kind": "linear"}})
    with pytest.raises(ConfigError, match="whole_records must be true or false"):
        from_dict(values | {"data": data | {"whole_records": 3}})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "must be a JSON list"),
        ("{}", "a list of at least one record"),
        ("[3]", "record 0 must have fields"),
        ('[{"instruction": "a", "output": ""}]', "record 0 must have a text 'output'"),
    ],
)
def test_records_that_are_none_are_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(DataError, match=says):
        read_records(tmp_path / "r.json")


def test_records_are_divided_by_length_by_label_or_by_client(tmp_path: Path, path: Path) -> None:
    by_length = instruction_data(str(path), byte_tokenizer(), kind="pathological", clients=5, max_length=80)
    means = [float((by_length.y[torch.from_numpy(r)] != NOTHING).sum(1).double().mean()) for r in by_length.train]
    assert max(means) > 1.5 * min(means)
    told = [{**r, "who": f"p{k % 3}"} for k, r in enumerate(records())]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, told)))
    owned = instruction_data(
        "r.jsonl",
        byte_tokenizer(),
        root=tmp_path,
        kind="natural",
        clients=None,
        min_samples=5,
        columns={"client": "who"},
        max_length=80,
    )
    assert owned.names == ["p0", "p1", "p2"]
    with pytest.raises(ConfigError, match="renames labels"):
        instruction_data(str(path), byte_tokenizer(), kind="permuted-groups", clients=4, max_length=80)


# ------------------------------------------------------------------------------------------------ training

METHODS = [
    method_of(FedLoRA, rank=2, lr=0.02, optimizer="adamw"),
    method_of(FedLoRU, rank=2, tau=2, lr=0.02, optimizer="adamw"),
    method_of(PFedLoRU, rank=2, tau=2, own_ranks=(1,), private_head=False, lr=0.02, optimizer="adamw"),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_methods_train_language_models_and_peft_gives_the_same_loss(
    method: Any, data: FederatedData, tmp_path: Path
) -> None:
    sim = run(method, data, rounds=3)
    lines = sim.result.curve  # type: ignore[attr-defined]
    assert lines[-1]["loss"]["mean"] < lines[0]["loss"]["mean"] - 0.002  # the small random head allows no more
    clients = sim.result.per_client  # type: ignore[attr-defined]
    assert clients["perplexity"] == pytest.approx([math.exp(v) for v in clients["loss"]])
    pair = 2 * (16 + 16) + 2 * (8 + 16)  # rank 2: q_proj of 16 x 16, v_proj of 8 x 16
    told = [line["bytes"]["announce"] for line in lines]
    assert all(line["bytes"]["up"] == line["bytes"]["down"] == 2 * pair * 8 for line in lines)
    assert told == ([0, 4 * pair * 8, 0] if method.tau else [0] * 3)  # to all four clients

    task, weights = sim.personal(0)
    before_export = tree.digest(dict(task.module.state_dict()))
    rank = save_adapter(task, weights, tmp_path / "adapter", "base")
    assert rank == 2 * (2 if method.tau else 1) + (1 if isinstance(method, PFedLoRU) else 0)
    save_merged(sim.task, sim.task.init(), tmp_path / "base")
    base = load_base(str(tmp_path / "base")).double()
    before = loss_of(base, data)
    after = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"), autocast_adapter_dtype=False)
    assert abs(loss_of(after, data) - clients["loss"][0]) < 1e-10 < abs(before - clients["loss"][0])
    save_merged(task, weights, tmp_path / "merged", byte_tokenizer())
    assert abs(loss_of(load_base(str(tmp_path / "merged")).double(), data) - clients["loss"][0]) < 1e-10
    assert tree.digest(dict(task.module.state_dict())) == before_export  # copies may share, but nobody writes there
    assert load_tokenizer(str(tmp_path / "merged")).encode("sun") == byte_tokenizer().encode("sun")


def test_mapped_and_looped_clients_learn_the_same(data: FederatedData) -> None:
    a, b = (run(METHODS[1], data, rounds=2, mapping=mapping) for mapping in ("vmap", "loop"))
    assert_close(a.record.server, b.record.server, 1e-10)  # AdamW divides by small numbers
    assert_close(a.record.common, b.record.common, 1e-10)


def test_whole_weights_are_exported_by_their_difference(data: FederatedData, tmp_path: Path) -> None:
    sim = run(FedAvg(lr=0.5), data, rounds=2)
    rank = save_adapter(*sim.personal(1), tmp_path / "adapter")
    assert rank <= 16
    save_merged(sim.task, sim.task.init(), tmp_path / "base")
    lm = peft.PeftModel.from_pretrained(
        load_base(str(tmp_path / "base")).double(), str(tmp_path / "adapter"), autocast_adapter_dtype=False
    )
    assert abs(loss_of(lm, data, 1) - sim.result.per_client["loss"][1]) < 1e-10  # type: ignore[attr-defined]


def test_other_adapters_are_exported_by_their_product(data: FederatedData, tmp_path: Path) -> None:
    sim = run(method_of(FedLoRA, rank=2, adapter="loha", lr=0.02, optimizer="adamw"), data, rounds=1)
    save_adapter(*sim.personal(0), tmp_path / "adapter")
    save_merged(sim.task, sim.task.init(), tmp_path / "base")
    lm = peft.PeftModel.from_pretrained(
        load_base(str(tmp_path / "base")).double(), str(tmp_path / "adapter"), autocast_adapter_dtype=False
    )
    assert abs(loss_of(lm, data) - sim.result.per_client["loss"][0]) < 1e-10  # type: ignore[attr-defined]


def test_what_an_adapter_cannot_hold_is_refused(data: FederatedData, tmp_path: Path) -> None:
    everything = run(FedAvg(lr=0.5), data, rounds=1, task=small_task(data, targets=()))
    with pytest.raises(ConfigError, match=r"holds weights of linear layers only, and 'lm.model.embed_tokens.weight'"):
        save_adapter(*everything.personal(0), tmp_path / "a")
    untouched = run(FedLoRA(rank=2), data, rounds=0)
    untouched_task, weights = untouched.personal(0)
    save_adapter(untouched_task, weights, tmp_path / "zero")  # a product of zero is an adapter all the same
    with pytest.raises(ConfigError, match="still its base"):
        save_adapter(*run(FedAvg(lr=0.5), data, rounds=0).personal(0), tmp_path / "b")
    with pytest.raises(ConfigError, match="needs a head"):
        run(FedRep(), data, rounds=1)


def test_constants_are_shared_by_copies_and_only_targets_are_trained(data: FederatedData) -> None:
    task = small_task(data)
    assert {k.rpartition(".")[0].rpartition(".")[2] for k in task.names} == {"q_proj", "v_proj"}
    lm = task.module
    assert isinstance(lm, CausalLM)
    other = copy.deepcopy(lm)
    frozen, trained = "lm.model.embed_tokens.weight", "lm.model.layers.0.self_attn.q_proj.weight"
    a, b = dict(lm.named_parameters()), dict(other.named_parameters())
    assert a[frozen].data_ptr() == b[frozen].data_ptr() and a[trained].data_ptr() != b[trained].data_ptr()
    other.float()
    assert a[frozen].dtype == torch.float64 and b[frozen].dtype == torch.float32
    assert tree.digest(dict(task.init())) == tree.digest(small_task(data).init())
    with pytest.raises(ConfigError, match=r"targets must end the name of a linear layer. Got 'w_proj'. Did you mean"):
        small_task(data, targets=("w_proj",))


def test_a_language_task_wants_rows_of_labels(data: FederatedData) -> None:
    pairs = [(torch.zeros(4, 5, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))] * 2
    with pytest.raises(ConfigError, match="must turn rows of tokens into rows of logits"):
        Simulation(FedAvg(), Task(nn.Embedding(7, 7), "language"), FederatedData.from_arrays(pairs), rounds=1)


def test_an_experiment_file_runs_and_exports(path: Path, tmp_path: Path) -> None:
    exp = tmp_path / "lm.toml"
    exp.write_text(
        f"""
rounds = 1
[data]
source = "{path.name}"
root = "{path.parent}"
max_length = 64
[partition]
clients = 2
[model]
kind = "causal-lm"
hidden = 16
heads = 2
kv_heads = 1
layers = 1
targets = ["v_proj"]
[method]
name = "fedloru"
rank = 2
tau = 1
[train]
workers = 1
"""
    )
    run_dir = str(tmp_path / "run")
    assert "perplexity" in call("run", str(exp), "--out", run_dir).stdout
    told = call("export", run_dir, str(tmp_path / "adapter"), "--client", "0", "--format", "peft").stdout
    assert "adapter of rank 4" in told
    base = load_base(str(tmp_path / "adapter" / "base"))
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"] == ["v_proj"]
    lm = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    held = instruction_data(path.name, byte_tokenizer(), root=path.parent, clients=2, max_length=64)
    assert loss_of(lm, held) == pytest.approx(result["per_client"]["loss"][0], abs=1e-5)
    call("export", run_dir, str(tmp_path / "whole"), "--client", "1", "--format", "huggingface")
    assert (tmp_path / "whole" / "tokenizer.json").is_file()
    assert "new or empty" in failing("export", run_dir, str(tmp_path / "whole"), "--client", "1", "--format", "peft")
    assert "one label per example" in failing("partition", str(exp))
    assert "needs instruction records" in failing("run", str(exp), "data.source=digits")
    assert "was not found" in failing("run", str(exp), "data.source=none.json")
