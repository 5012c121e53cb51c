# SPDX-License-Identifier: Apache-2.0
"""Writes `docs/models.md` from the marks of the tests.

`@pytest.mark.supports(feature, *families, refused=reason)` says that a test shows a feature, for
the families named, else for the one that its parameter `family` is, else for all; `refused` says
that what it shows is the refusal.

`@pytest.mark.shows(what, control=test)` says that a test of any folder shows something, and which
test is its control: there a connector moves nothing, or less or other bytes, and the same
comparison fails. A control is in the same file, or is given as `folder/file.py::test`.

`python -m tests.support_table` writes the page; a test compares it with the marks.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
END_TO_END = TESTS / "e2e"
PAGE = ROOT / "docs" / "models.md"
HEAD = """\
# Models and features

<!-- Written by `python -m tests.support_table` from the marks of the tests; do not edit. -->

What `make test` checks with real vLLM engines on CPUs, by cache family; an empty field is not
tested. "hand-off" compares answers with an engine that has no connector, and the KV byte for byte
with the prefill engine's; a connector that moves nothing fails it. The features in the rows below
it are compared with the answers of a decode engine that computes the prompt itself.

"""
SHOWN = """
## Each with its control

These are checked with real engines (`e2e`), or with vLLM's scheduler and a made-up model that reads
every byte of its KV, or with vLLM's own layers, kernels and caches. The control is a test in which
nothing is moved, or less, or other bytes: there the same comparison fails.

"""
TAIL = """
## Other requests

| | | shown |
| --- | --- | --- |
| images and other inputs beside tokens | their content is part of the prompt, by vLLM's hashes: \
handed off and shared with the same image at the same place only | above; also with vLLM's \
requests and in the simulation |
| a prompt that ends with an image, of a model whose prompts are cut (windows, states) | not \
handed off (`multimodal_tail`), as the last token cannot be left out | in process |
| a session of streamed input (`resumable`) | the decode engine loads the first prompt; a prefill \
engine hands no session off (`resumable`) | above |
| beam search | vLLM's server asks its engine anew for each token, without the request's \
`kv_transfer_params`, so no connector sees them. The decode engine computes the prompt; what was \
prefilled for it is kept for `handoff_ttl_s`. A prefill engine's answer has no \
`kv_transfer_params` | with real engines |
| answers of reasoning models | kept up to their first thought; `thinking: keep` keeps them whole \
| above |

## Engines that differ

Engines that differ in block size, tensor-parallel size, cache layout or attention kernels read each
other's KV if the connector knows how the kernels of both fill a page, and if these keep the same of
a token, in numbers of the same type: keys and values (FlashAttention, FlashInfer, Triton, Flex
attention and their kin on GPUs; on x86 CPUs those with and without tiles of AMX), or the latents of
MLA. With other kernels, and with quantized KV if the kernels differ, the engines must be alike in
these; else they refuse each other, and the error names what differs. So do a GPU and a CPU.
Prefixes are shared by engines with the same kernels.

| | between like engines | where block size, tensor-parallel size or layout differ |
| --- | --- | --- |
| FP8 KV, or scales for each token and head | yes (**) | yes |
| TurboQuant | yes (**) | yes |
| NVFP4 KV, TurboQuant with FlyDSL: scales lie behind all tokens of a block | yes (*) | no |
| UltraQuant, and kinds of quantized KV that packages register | yes | no |
| sparse MLA with an indexer (DeepSeek V3.2) | yes | in tensor-parallel size only |
| other kernels of ROCm, and of other packages | yes | no |

In the last column the kernels are the same on both sides.

(*) FlashInfer writes NVFP4 in two ways, by the GPU: `fa2` and `trtllm`; they refuse each other.
(**) Some GPUs encode FP8 numbers in another way: those of AMD's MI300 series (`fnuz`), and with
`turboquant_k8v4` NVIDIA's before Ada (`e4b15`). These and others refuse each other.
Each kind of quantized KV is compared by its name, as in `TRITON_ATTN.fp8_e4m3`.
On CPUs, `make test` checks the layouts of this table, but not the kernels that need a GPU.

## Recurrent states

Tensor-parallel ranks share out a state in a way that depends on its layer. Engines of other
tensor-parallel sizes hand off the states of layers whose way is known, and refuse the others by
name. With `--use-replayssm` more than the states is kept, and only equal sizes hand off.

| vLLM's layer | cut | shown |
| --- | --- | --- |
| short convolutions (LFM2) | channels | with real engines, byte for byte |
| Mamba 1 and 2 | channels; x, B and C each by itself, B and C of a single group on every rank | \
with vLLM's own layers, by the weights that each rank loads; Mamba 2 also with vLLM's scheduler \
and a made-up model |
| gated delta nets (Qwen3-Next, Qwen3.5, Olmo Hybrid), Kimi delta attention | query, key and value \
each by itself; value heads | with vLLM's own layers of Qwen, Olmo and Kimi; Kimi K3, GLM-5.3 \
flash and Bailing V3 by their source alone |
| linear attention (MiniMax, Bailing) | heads | with vLLM's own layer of MiniMax; Bailing by its \
source alone |
| states that vLLM says all ranks have (`tp_replicated`) | none | in process |

Both engines must keep convolutions in the same order (`VLLM_SSM_CONV_STATE_LAYOUT`).

## Circular buffers

DeepSeek-V4.1, Qwen3.8 next and GLM-5.3 flash keep the latest tokens of a request in one block, in
which later tokens overwrite earlier ones (`CircularBufferSpec`). They need a GPU, so no real engine
has run here.

| | |
| --- | --- |
| hand-off | the whole block, as it is when the prompt ends, between any tensor-parallel sizes |
| buffers of other sizes | refused by name. The size depends on the number of speculative tokens, \
so set the same on both sides |
| shared prefixes | without the buffers: prefixes end where the next token does not read them |

## Bounded replay

vLLM keeps the sliding windows of DeepSeek-V4.1 in no prefix cache. After a prefix hit it computes
the last window of it again (`--swa-bounded-replay`, on by default). The windows of the made-up
model do not depend on the place from which they are computed again; those of vLLM's model do, a
little.

| | |
| --- | --- |
| hand-off | with the window, between any tensor-parallel and block sizes: nothing is computed \
again |
| shared prefixes | without the windows: vLLM computes the last window again, as after a hit in \
its own prefix cache. A prefix no longer than the window is not loaded |
| vLLM 0.31 | refuses to start, as vLLM computes a window again that a load has brought; set \
`--no-swa-bounded-replay` |

## Context parallel

Engines with `--decode-context-parallel-size` or `--prefill-context-parallel-size` above 1 are
refused at the start, by name. There the tokens of one block are spread over the ranks, so that a
rank's slot holds every n-th token, or a part of the prompt; the connector knows no such slots, and
nothing that runs on a CPU shows which bytes the kernels leave out.

## Recurrent states with speculative decoding

vLLM's CPU build cannot run drafts beside recurrent states, such as the MTP of Qwen3-Next. The
made-up model leaves a state after each draft as vLLM does, here and in the simulation.

| | |
| --- | --- |
| hand-off | yes, between engines that draft equally many tokens (vLLM's states have other shapes \
with other numbers of drafts, and are refused by name) |
| MTP of several modules | yes, but for prompts in whose last tokens a block with a state ends |
| shared prefixes | the states of prompts are shared, and with asynchronous scheduling (vLLM's \
default) those within answers. Without it, or with MTP of several modules, a state within an \
answer is shared if vLLM gives its block a hash before it frees the block. Ends of requests \
within blocks are not shared |

## A drafter on one side only

A prefill engine may have no drafter where the decode engine has one, or the other way round. How
many drafts are accepted after a hand-off, and by an engine that computes the prompt, stands
[here](../benchmarks/results/acceptance.md).

| | |
| --- | --- |
| the decode engine alone drafts | the target's KV is loaded, the drafter's pages are zeroed; at \
first fewer drafts may be accepted |
| the prefill engine alone drafts | the drafter's layers are left out; with MTP of k modules the \
decode engine computes the last k tokens |
| other tensor-parallel sizes, block sizes and layouts; pipeline stages \
| as between engines without a drafter |
| vLLM groups the target's layers in another way beside a drafter, so that a group has layers of \
several groups of the other engine (Gemma 3) | refused by name (`groups that have the layers of \
group`) |
| recurrent states | refused by name (`states`): vLLM's have another shape beside drafts |
| KV scales of the drafter's layers that are not 1 | refused by name (`scales`) |
| shared prefixes | not between engines with a drafter and engines without; nor of what was loaded \
without the drafter's KV |
| weights that change while the engines run | a trainer has to name them: digests of weights in \
memory include the drafter's |

## Pipeline parallel

Each rank of each pipeline stage has an arena of its own, which holds the layers of its stage. When
two engines meet, they compare the names of the layers of every stage. A stage reads its layers from
the stages of the other engine that have them, so that one engine may have more stages than the
other, or none. The tensor-parallel sizes within the stages may differ, as they may without stages.
Where the stages are equal, slots are copied to blocks as they are. Where they differ, a stage
copies the pages of the slots that hold its layers, and checks the whole slots. Engines whose layers
differ refuse each other by the names of these layers, and the decode engine computes the prompt.
Prefixes are shared by engines with equal stages and equal tensor-parallel sizes.

Speculative decoding with stages is shown with vLLM's scheduler and a made-up model, with and
without KV of the drafter, on one side or both: vLLM's V1 runner, which its CPU build has, starts
no such engine from 0.32 on, with or without a connector. An engine refuses to start if vLLM gives
layers of two stages one name. vLLM does so with EAGLE for some models, such as Llama, as it
numbers the drafter's layers behind those of the last stage. If they lie within the last stage,
vLLM itself ends with `Duplicate layer name`. EAGLE-3, MTP and draft models have names of their
own.

## KV that several ranks hold

The tensor-parallel ranks of an engine hold the same latents of MLA, and the same pages of its
indexer. Where a model has fewer KV heads than ranks, several ranks hold the same head: at TP 8
ranks 0 and 1 hold the first of 4 heads. If several ranks hold the same of a cache group, one copy
of each of its blocks is kept for them: each of these ranks saves a part of the blocks to its arena,
and loads from the arenas of all of them. So a token takes as many bytes of arenas at TP 8 as at
TP 1 with MLA, and as at TP 4 with 4 KV heads, and is saved once. A rank then loads what another
rank has computed of the same head. Stores keep one copy of each group, too.

| model and deployment | copies of the KV in the arenas of an engine |
| --- | --- |
| MLA, also with an indexer (DeepSeek V2 to V3.2) | one; \
with pipeline stages, each stage keeps its layers once |
| the ranks of a pipeline stage are on several hosts, or Ray places them | one a rank: a \
rank could not read the arenas of the others |
| fewer KV heads than ranks (GQA, such as Qwen3 with 4 heads at TP 8) | one of each head |
| groups, or a drafter, with other numbers of KV heads (MiMo-V2-Flash, MLA with a drafter of GQA) \
| one for the ranks that hold the same of all groups: one for every two ranks at TP 8 with layers \
of 4 and of 2 heads. Groups of which each rank has heads of its own do not count: it is the same \
with layers of 4 and of 8 heads |
| attention or MLA beside recurrent states, which all ranks divide (Qwen3-Next, Kimi Linear) | one \
of each head, or of MLA; each rank keeps its part of the states |
| the same with pipeline stages, or with KV events of vLLM | one a rank |
| NVFP4 KV, or layers whose keys and values do not come from vLLM's `QKVParallelLinear` (the \
Transformers backend, layers that read the KV of others) | one a rank, unless it is MLA |
| pipeline stages | each stage by its own layers |

How many ranks hold a head is read from the model in each worker. That needs the plugin in the
worker before the model is loaded, as vLLM does by itself unless `VLLM_PLUGINS` leaves it out.
Otherwise each rank keeps a copy, except of MLA.

Hand-offs go from either to either, whatever the tensor-parallel sizes are. Prefixes are shared
through arenas by engines of equal tensor-parallel sizes that keep KV in the same way.

## Data parallel and expert parallel

A data-parallel rank is an engine of its own for the connector: it has an id (`..._dp0`, `..._dp1`),
an arena, and with `listen` the port of its number after the first. Any rank of one side hands off
to any rank of the other, so the sides may differ in data-parallel size. Experts have no KV: the
ranks of a wide expert-parallel deployment hand off like any others.

| deployment | how the connector meets it | shown |
| --- | --- | --- |
| one server, a dense model | vLLM's ranks step independently; all arenas on a host share the \
part of its memory that one engine would take | with real engines, two ranks a side, behind the \
router, in one runtime folder and with `listen` |
| one server, a mixture of experts | the ranks step together, so what a rank starts with its \
step waits for the slowest rank; loads and copies do not | a rank that is held up, in process; \
no expert-parallel kernels have run |
| a server for each rank (`--data-parallel-rank`) | each is a deployment of its own: one after \
the other, arenas take their part of what the others leave; set `arena_gib` if that is too \
little for the last | not run |
| several hosts | as one server each; `listen` and `peers` name the hosts | by ports of several \
ranks on one host; not run on several |
"""


NAME = "support table"


@dataclass(frozen=True)
class Shown:
    """A row of the second table.

    Attributes:
        what: is shown.
        file: of the test, relative to the folder of all tests.
        test, control: names of functions.
    """

    what: str
    file: str
    test: str
    control: str

    @property
    def cells(self) -> tuple[str, str, str]:
        """Of a row."""
        return self.what, f"{_sentence(self.test)} (`{self.file}`)", _sentence(self.control)


def shown(tests: Path = TESTS) -> list[Shown]:
    """What the marks `shows` say, by file and line.

    Raises:
        ValueError: a mark names a control that does not exist.
    """
    found = []
    for path in sorted(tests.rglob("test_*.py")):
        if "pytest.mark.shows" not in (text := path.read_text()):
            continue
        functions = _functions(text)
        for test, function in functions.items():
            for what, control in _marks(function):
                file, _, name = control.rpartition("::")
                others = _functions((tests / file).read_text()) if file else functions
                if name not in others or not name.startswith("test_"):
                    raise ValueError(f"{path}: {test} has no control {control}")
                found.append(Shown(what, str(path.relative_to(tests)), test, name))
    return found


def _sentence(test: str) -> str:
    """The name of a test as it is read."""
    names = {"kv": "KV", "vllm": "vLLM"}
    return " ".join(names.get(word, word) for word in test.removeprefix("test_").split("_"))


def _functions(text: str) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)}


def _marks(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """What a test shows, and with which control."""
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.shows":
            (what,) = mark.args
            (control,) = mark.keywords
            yield ast.literal_eval(what), ast.literal_eval(control.value)


class Table:
    """A pytest plugin that gathers the marks of what is collected.

    Attributes:
        families: name to what it caches, in the order of the page.
        cells: by feature and family, "yes" or the reason of the refusal.
        files: those whose tests were collected.
    """

    def __init__(self) -> None:
        self.families: dict[str, str] = {}
        self.cells: dict[str, dict[str, str]] = {}
        self.files: set[Path] = set()

    @pytest.hookimpl(tryfirst=True)  # before options leave some out
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items = [item for item in items if END_TO_END in item.path.parents]
        self.files |= {item.path for item in items}
        for item in items:
            callspec = getattr(item, "callspec", None)
            family = callspec.params.get("family") if callspec else None
            if family is not None and hasattr(family, "caches"):
                self.families.setdefault(family.name, family.caches)
        for item in items:
            callspec = getattr(item, "callspec", None)
            family = callspec.params.get("family") if callspec else None
            for mark in reversed(list(item.iter_markers("supports"))):
                feature, *named = mark.args
                refused = mark.kwargs.get("refused")
                names = named or ([family.name] if family is not None else list(self.families))
                for name in names:
                    if family is None or name == family.name:
                        row = self.cells.setdefault(feature, {})
                        row[name] = refused or row.get(name, "yes")

    def page(self) -> str:
        """The whole page."""
        notes: list[str] = []
        unknown = {name for row in self.cells.values() for name in row} - set(self.families)
        if unknown:
            raise ValueError(f"marks name unknown families: {sorted(unknown)}")

        def cell(value: str) -> str:
            if value in ("", "yes"):
                return value
            if value not in notes:
                notes.append(value)
            return f"no ({notes.index(value) + 1})"

        rows = [["", *self.families], ["---"] * (len(self.families) + 1)]
        rows.append(["caches", *self.families.values()])
        for feature, values in self.cells.items():
            rows.append([feature, *(cell(values.get(name, "")) for name in self.families)])
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        lines += [""] if notes else []
        lines += [f"{number}. {note[0].upper()}{note[1:]}." for number, note in enumerate(notes, 1)]
        controlled = [("", "shown by", "control"), ("---",) * 3, *(row.cells for row in shown())]
        more = ["| " + " | ".join(row) + " |" for row in controlled]
        return HEAD + "\n".join(lines) + "\n" + SHOWN + "\n".join(more) + "\n" + TAIL


def page_of(config: pytest.Config) -> str | None:
    """The page that this run's own tests make, if all end-to-end tests were collected for it."""
    table = config.pluginmanager.get_plugin(NAME)
    if any("::" in argument for argument in config.args):
        return None
    if not isinstance(table, Table) or table.files != set(END_TO_END.rglob("test_*.py")):
        return None
    return table.page()


def collect() -> str:
    """Collect the end-to-end tests and return the page that they make."""
    table = Table()
    arguments = ["--collect-only", "-qq", "--no-summary", str(END_TO_END)]
    status = pytest.main(arguments, plugins=[table])
    if status != pytest.ExitCode.OK:
        raise SystemExit(f"the tests could not be collected: {status}")
    return table.page()


if __name__ == "__main__":
    page = collect()
    if sys.argv[1:] == ["--check"]:
        if PAGE.read_text() != page:
            raise SystemExit(f"{PAGE} is out of date: run `python -m tests.support_table`")
    else:
        PAGE.write_text(page)
