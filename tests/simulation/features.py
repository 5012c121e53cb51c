# SPDX-License-Identifier: Apache-2.0
"""What else vLLM can be asked to do: some of the seeds ask for one such thing.

Each feature keeps the engines and events that the seed drew, as far as the feature allows. All its
draws are its own, so that seeds without a feature are as they were.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from omni_connector.vllm_v1.compat import may_load_replayed
from tests.simulation.engines.answering import PLAIN, Answering
from tests.simulation.engines.settings import EngineShape, Policy
from tests.simulation.hints import Wish
from tests.simulation.plan import (
    LONGEST,
    SLOW_S,
    Event,
    Plan,
    blocks_of,
    groups_of,
    has_states,
)
from tests.simulation.scenes import hand_off, serve
from tests.toy import LAYERS, STATE_HEADS, UNDRAFTED

_OFTEN: Final = 0.2

_FAILING_OFTEN: Final = 0.25

_PIPED_OFTEN: Final = 0.08

_REPLICATED_OFTEN: Final = 0.15

_FAR_OFTEN: Final = 0.15

_COPIED_OFTEN: Final = 0.15

# The same with layers of more heads.
_WITH_MORE: Final = {
    "full": ("full", "more"),
    "window and full": ("window and full", "more and full", "more and full"),
    "state and full": ("state and full", "state and latent"),
}
# Tensor-parallel sizes of the engines of a plan, in turn.
_RANKS: Final = ((4,), (4,), (8,), (1, 4), (4, 2), (2, 4), (8, 4), (4, 8))
# The same with states, which have four heads.
_RANKS_OF_STATES: Final = ((4,), (4,), (2,), (1, 4), (4, 2), (2, 4))

_SELECTIVE_OFTEN: Final = 0.1

_LONG_ANSWER: Final = 23
"""Tokens of a long answer: more than a block of the largest size, 16."""

_WITH_DRAFTER: Final = {
    "full": "full and drafter",
    "window and full": "window, full and drafter",
    "state and full": "state, full and drafter",
}

# The same with the drafter's layers in a group of the model.
_JOINED: Final = {
    "full and drafter": "full with drafter",
    "window, full and drafter": "window, full with drafter",
}

_ONE_SIDED_OFTEN: Final = 0.04

_WITH_RING: Final = {
    "full": "ring and full",
    "latent": "ring and latent",
    "window": "ring and full",
}

# With windows that vLLM computes again after a prefix hit.
_WITH_REPLAY: Final = {
    "full": "replayed and full",
    "window": "replayed and full",
    "window and full": "replayed and full",
    "latent": "ring, replayed and latent",
}

_REPLAYED_OFTEN: Final = 0.08

_CHUNKED: Final = {"window": "chunk", "window and full": "chunk and full"}


_RECUT_OFTEN: Final = 0.4

_MATCHED_OFTEN: Final = 0.25
_CROWDED_OFTEN: Final = 0.3

_NEXT_TURNS_OFTEN: Final = 0.3


def featured(plan: Plan, draw: random.Random) -> Plan:
    """The same with a feature, for some of the plans; the plan itself for the others.

    Args:
        draw: of this, and of nothing else.
    """
    if draw.random() >= _OFTEN:
        return plan
    return draw.choice(FEATURES)(plan, draw)


def piped(plan: Plan, draw: random.Random) -> Plan:
    """The same with the layers spread over pipeline stages, for some of the plans; the plan itself
    for the others. In half of them each engine spreads them in its own way, or not at all.

    Args:
        draw: of this, and of nothing else.
    """
    # The other connector of MultiConnector takes no metadata of several pipeline stages.
    alone = not any(each.beside for each in plan.engines)
    if draw.random() >= _PIPED_OFTEN or not alone:
        return plan
    layers = LAYERS * min(groups_of(each.family) for each in plan.engines)

    def split() -> tuple[int, ...]:
        return tuple(sorted(draw.sample(range(1, layers), draw.choice((1, 1, 2)))))

    common, late = split(), draw.choice((0.0, 0.3))
    alike = draw.random() < 0.5
    engines = []
    for each in plan.engines:
        stages = common if alike else draw.choice((common, split(), ()))
        if each.drafts and not each.overlap:
            # Else vLLM may take a request's drafts before it has the token that they follow, where
            # a step is under way beside the last one of the prompt.
            stages = ()
        # V1 has no async scheduling with stages.
        runner = "v2" if each.overlap and stages else each.runner
        engines.append(replace(each, stages=stages, late_reports=late, runner=runner))
    return replace(plan, engines=tuple(engines))


def spoilt(plan: Plan, draw: random.Random) -> Plan:
    """The same with hand-offs during which bytes change that one reader of a slot needs and another
    does not, for most of the plans whose engines have other layers and the same blocks otherwise;
    the plan itself for the rest. The first engine, which offers hand-offs, has no stages then.

    Args:
        draw: of this, and of nothing else.
    """
    unlike = {(each.family, each.stages) for each in plan.engines}
    blocks = {(each.block_size, each.ranks) for each in plan.engines}
    if len(unlike) == 1 or len(blocks) > 1 or draw.random() < 0.2:
        return plan
    stages = next((each.stages for each in plan.engines if each.stages), ())
    first = plan.engines[0].name
    engines = tuple(
        replace(
            each,
            integrity="full",
            stages=() if each.name == first or each.drafts else stages,
            runner="v2" if each.overlap else each.runner,
        )
        for each in plan.engines
    )
    plan = replace(plan, engines=engines, mapped=True, native=True)
    producers = [each.name for each in plan.engines if each.role != "kv_consumer"]
    consumers = [each.name for each in plan.engines if each.role != "kv_producer"]
    events = list(plan.events)
    for _ in range(5):
        prefill = draw.choice((producers[0], draw.choice(producers)))
        prompt = draw.randrange(3), draw.choice((20, 33, 37))
        asked = hand_off(prefill, consumers[-1], prompt)
        events.append(Event("hand_off", asked, draw.choice((0, 30, 100)), len(events)))
        acts = draw.choice((3, 10, 20, 40, 60))
        events.append(Event("spoil", {"engine": prefill}, acts, len(events)))
    return replace(plan, events=tuple(events))


def replicated(plan: Plan, draw: random.Random) -> Plan:
    """The same with a model of which all ranks hold the same KV, on several ranks, for some of the
    plans; the plan itself for the others. In a third of them engines have other numbers of ranks.
    Some engines have their ranks on several hosts, where each keeps all slots.

    Args:
        draw: of this, and of nothing else.
    """
    if draw.random() >= _REPLICATED_OFTEN or plan.engines[0].family not in ("full", "latent"):
        return plan
    sizes = draw.choice(((2,), (2,), (3,), (4,), (1, 2), (2, 1), (4, 2)))
    late = draw.choice((0.0, 0.0, 0.3))
    engines = tuple(
        replace(
            each,
            family="latent",
            ranks=sizes[number % len(sizes)],
            late_reports=late,
            far_ranks=draw.random() < _FAR_OFTEN,
        )
        for number, each in enumerate(plan.engines)
    )
    plan = replace(plan, engines=engines)
    return _served_again(plan, draw) if draw.random() < 0.5 else plan


def with_copied_heads(plan: Plan, draw: random.Random) -> Plan:
    """The same with more ranks than KV heads, for some of the plans; the plan itself for the
    others. In half of them engines have other numbers of ranks. Some engines have their ranks on
    several hosts, where each keeps all slots.

    Args:
        draw: of this, and of nothing else.
    """
    families = _WITH_MORE.get(plan.engines[0].family)
    if draw.random() >= _COPIED_OFTEN or families is None:
        return plan
    family = draw.choice(families)
    sizes = draw.choice(_RANKS_OF_STATES if has_states(family) else _RANKS)
    late = draw.choice((0.0, 0.0, 0.3))
    engines = tuple(
        replace(
            each,
            family=family,
            ranks=sizes[number % len(sizes)],
            late_reports=late,
            far_ranks=draw.random() < _FAR_OFTEN,
        )
        for number, each in enumerate(plan.engines)
    )
    plan = replace(plan, engines=engines)
    return _served_again(plan, draw) if draw.random() < 0.5 else plan


def recut(plan: Plan, draw: random.Random) -> Plan:
    """The same with engines of other numbers of ranks and without hints, for some of the plans
    whose models have states, which each layer cuts in a way of its own; the plan itself for the
    others.

    Args:
        draw: of this, and of nothing else.
    """
    if draw.random() >= _RECUT_OFTEN or not has_states(plan.engines[0].family):
        return plan
    return _ranks(_unhinted(plan), draw)


def matched_within_blocks(plan: Plan, draw: random.Random) -> Plan:
    """The same with `--prefix-match-unit`, for some of the plans whose engines keep the states of
    prefixes; the plan itself for the others. In some of them engines match in units of their own.

    Args:
        draw: of this, and of nothing else.
    """
    fits = all(
        has_states(each.family) and each.caching and each.states == "align" and not each.drafts
        for each in plan.engines
    )
    if draw.random() >= _MATCHED_OFTEN or not fits:
        return plan
    alike = draw.random() < 0.7
    part = draw.choice((2, 4))
    engines = tuple(
        replace(each, match_unit=each.block_size // (part if alike else draw.choice((1, 2, 4))))
        for each in plan.engines
    )
    plan = replace(plan, engines=engines)
    return _crowded(plan, draw) if draw.random() < _CROWDED_OFTEN else plan


def _crowded(plan: Plan, draw: random.Random) -> Plan:
    """Many requests whose prompts end within blocks, at engines with few blocks."""
    engines = tuple(
        replace(
            each,
            # vLLM copies the block within which it matches, and needs one more for that.
            blocks=blocks_of(each.family, each.block_size, draw.choice((1, 2, 3))),
            seqs=8,
            step_s=0.0,
        )
        for each in plan.engines
    )
    events = []
    for event in plan.events:
        how = event.how
        if event.what == "hand_off":
            family, _ = how["prompt"]
            how = how | {"times": 4, "prompt": (family, draw.choice((5, 13, 20)))}
        events.append(replace(event, how=how))
    return replace(plan, engines=engines, events=tuple(events))


def replayed(plan: Plan, draw: random.Random) -> Plan:
    """The same with windows that vLLM computes again after a prefix hit, for some of the plans; the
    plan itself for the others.

    Args:
        draw: of this, and of nothing else.
    """
    family = _WITH_REPLAY.get(plan.engines[0].family)
    fits = not any(each.beside or each.drafter for each in plan.engines)
    if draw.random() >= _REPLAYED_OFTEN or family is None or not fits or not may_load_replayed():
        return plan
    more = groups_of(family) / groups_of(plan.engines[0].family)
    engines = tuple(
        replace(each, family=family, slots=int(each.slots * more), blocks=int(each.blocks * more))
        for each in plan.engines
    )
    # The model of hints takes each group for one whose blocks are kept.
    plan = _unhinted(replace(plan, engines=engines))
    return _served_again(plan, draw) if draw.random() < 0.4 else plan


def next_turns(plan: Plan, draw: random.Random) -> Plan:
    """The same with engines that draft, and with clients that go on after long answers at other
    engines, which find the states of these; for some of the plans whose models have states. The
    plan itself for the others.

    Args:
        draw: of this, and of nothing else.
    """
    fits = all(
        has_states(each.family) and each.caching and each.states == "align" and not each.drafts
        for each in plan.engines
    )
    alone = not any(each.beside or each.role is None for each in plan.engines)
    if draw.random() >= _NEXT_TURNS_OFTEN or not (fits and alone):
        return plan
    engines = tuple(
        _drafting(_sharing(each, 40 * groups_of(each.family)), draw) for each in plan.engines
    )
    happens: list[tuple[int, dict[str, Any]]] = []
    for _ in range(4):
        for family in draw.sample(range(3), 3):
            first, then = draw.choice(engines).name, draw.choice(engines).name
            how = serve(first, (family, draw.choice((5, 8, 13, 16, 20, 29))), _LONG_ANSWER)
            happens.append((draw.choice((30, 100, 300)), how | {"next_at": then}))
    events = tuple(Event("serve", how, acts, i) for i, (acts, how) in enumerate(happens))
    return _unhinted(replace(plan, engines=engines, events=events, trouble={}))


def selective(plan: Plan, draw: random.Random) -> Plan:
    """The same with decode engines that compute prompts although their KV could be loaded, for some
    of the plans; the plan itself for the others.

    Args:
        draw: of this, and of nothing else.
    """
    if draw.random() >= _SELECTIVE_OFTEN:
        return plan
    return replace(plan, trouble=plan.trouble | {"refuses": draw.choice((0.3, 0.7))})


def one_sided(plan: Plan, draw: random.Random) -> Plan:
    """The same with a drafter on some of the engines only, for half of the plans whose engines have
    one with KV, and for some of the others; the plan itself for the rest.

    Args:
        draw: of this, and of nothing else.
    """
    if plan.engines[0].drafter:
        if draw.random() < 0.5:
            return plan
    elif draw.random() >= _ONE_SIDED_OFTEN or not _may_draft(plan):
        return plan
    else:
        plan = _drafters(_unshared(plan) if has_states(plan.engines[0].family) else plan, draw)
    family = plan.engines[0].family
    # Slots are as large as the pages of one group are with small blocks.
    small = all(each.block_size <= 8 for each in plan.engines)
    joined = _JOINED.get(family, family) if small and draw.random() < 0.5 else family
    first = draw.choice([each.name for each in plan.engines if each.role != "kv_consumer"])
    alone = draw.random() < 0.7
    without = {each.name for each in plan.engines if each.name == first or draw.random() < 0.5}
    if alone or len(without) == len(plan.engines):
        without = {first}
    engines = tuple(
        replace(each, family=UNDRAFTED[family], drafter="", drafts=0)
        if each.name in without
        else replace(each, family=joined)
        for each in plan.engines
    )
    plan = replace(plan, engines=engines)
    if has_states(family) or draw.random() < 0.4:
        return plan
    return _handed_and_shared(plan, first, draw)


def _may_draft(plan: Plan) -> bool:
    """Whether the engines of a plan can have a drafter with KV beside all else that they do."""
    return plan.engines[0].family in _WITH_DRAFTER and not (
        any(each.drafts or each.beside or each.role is None for each in plan.engines)
        or any(event.what == "converse" or event.how.get("session") for event in plan.events)
    )


def _sharing(engine: EngineShape, slots: int) -> EngineShape:
    """The engine as one that shares, with at least so many slots, whose own cache soon evicts."""
    return replace(
        engine,
        hosts=True,
        caching=True,
        step_s=0.0,
        slots=max(engine.slots, slots),
        blocks=blocks_of(engine.family, engine.block_size, 2),
    )


def _handed_and_shared(plan: Plan, prefill: str, draw: random.Random) -> Plan:
    """Prompts are handed off by one engine, and asked for at others that share, which find what
    their own caches have evicted in arenas."""
    engines = tuple(_sharing(each, 40 * groups_of(each.family)) for each in plan.engines)
    decodes = [each.name for each in engines if each.role != "kv_producer" and each.name != prefill]
    drafting = [each.name for each in engines if each.drafter]
    happens: list[tuple[int, str, dict[str, Any]]] = []
    for _ in range(2):
        for family in draw.sample(range(3), 3):
            how = hand_off(prefill, draw.choice(decodes), (family, draw.choice((33, 37))))
            happens.append((draw.choice((100, 300)), "hand_off", how))
            prompt = draw.randrange(3), draw.choice((33, 37))
            happens.append((draw.choice((100, 300)), "serve", serve(draw.choice(drafting), prompt)))
    events = tuple(Event(what, how, acts, i) for i, (acts, what, how) in enumerate(happens))
    return replace(plan, engines=engines, events=events, trouble={})


def _served_again(plan: Plan, draw: random.Random) -> Plan:
    """Engines that share are asked for prompts again that their own cache has evicted."""
    engines = tuple(_sharing(each, 40) for each in plan.engines)
    happens: list[tuple[int, str, dict[str, Any]]] = []
    for _ in range(3):
        engine = draw.choice(engines).name
        for family in draw.sample(range(3), 3):
            prompt = family, draw.choice((33, 37))
            happens.append((draw.choice((100, 300)), "serve", serve(engine, prompt)))
    events = tuple(Event(what, how, acts, i) for i, (acts, what, how) in enumerate(happens))
    return replace(plan, engines=engines, events=events)


def _full_pool(plan: Plan, draw: random.Random) -> Plan:
    """The KV of two prompts fills all blocks of a decode engine, none of which is left for their
    last tokens. Both are loaded at once, and others wait behind them."""
    plan = _without(plan, "kill", "restart", "stop", "jump", "end_thread")
    consumers = [each for each in plan.engines if each.role != "kv_producer"]
    decode = draw.choice(consumers)
    others = [each for each in plan.engines if each.role != "kv_consumer" and each is not decode]
    prefill = draw.choice(others)
    groups = groups_of(decode.family)
    engines = []
    for each in plan.engines:
        # The largest request fits: 60 tokens, in blocks of 4, 8 or 16.
        blocks = 2 * groups * (32 // each.block_size)
        engine = replace(each, step_s=0.0)
        if each is decode:
            engine = replace(engine, blocks=max(blocks, groups * -(-60 // each.block_size)))
        else:
            engine = replace(engine, slots=max(each.slots, 40 * groups))
        engines.append(engine)
    if draw.random() < 0.5:
        engines = [_drafting(each, draw) for each in engines]
    happens: list[tuple[int, str, dict[str, Any]]] = []
    for _ in range(3):
        for family in draw.sample(range(3), draw.choice((2, 3))):
            length = draw.choice((33, 33, 33, 37))
            how = hand_off(prefill.name, decode.name, (family, length))
            how["tokens"] = draw.choice((1, 3, 8))
            happens.append((draw.choice((0, 1, 10)), "hand_off", how))
        if draw.random() < 0.5:
            prompt = draw.randrange(3), draw.choice((5, 33, 37))
            how = {"engine": decode.name, "prompt": prompt, "tokens": 3, "priority": 0}
            happens.append((draw.choice((0, 100)), "serve", how))
        happens.append((draw.choice((100, 1000)), "hand_off", happens[0][2]))
    trouble = {"slow_copies": SLOW_S} if draw.random() < 0.5 else {}
    if draw.random() < 0.3:
        for _ in range(3):
            abort = draw.choice((3, 10, 30)), "abort", {"number": draw.randrange(4)}
            happens.insert(draw.randrange(1, len(happens) + 1), abort)
    events = tuple(Event(what, how, acts, i) for i, (acts, what, how) in enumerate(happens))
    return replace(plan, engines=tuple(engines), events=events, pace=0.0002, trouble=trouble)


def _ranks(plan: Plan, draw: random.Random) -> Plan:
    """Engines of several sizes hand off to each other."""
    sizes = draw.choice(((1, 2), (1, 2), (2, 4), (1, 4)))
    number = draw.randrange(2)
    engines = []
    for place, each in enumerate(plan.engines):
        late = draw.choice((0.0, 0.3))
        engines.append(replace(each, ranks=sizes[(number + place) % 2], late_reports=late))
    return replace(plan, engines=tuple(engines))


def _apart(plan: Plan, draw: random.Random) -> Plan:
    """Of two ranks one reports a step later than the other."""
    late = draw.choice((0.1, 0.5, 0.9))
    engines = tuple(replace(each, ranks=2, late_reports=late) for each in plan.engines)
    return replace(plan, engines=engines)


def _ends(plan: Plan, draw: random.Random) -> Plan:
    """Prefill engines answer several tokens, stop tokens end answers, and structured output has a
    request wait for its grammar."""
    events = []
    for event in plan.events:
        how = event.how
        if event.what == "hand_off":
            how = how | {
                "answers": draw.choice((1, 2, 8)),
                "prefill_how": _answering(draw),
                "decode_how": _answering(draw),
            }
        elif event.what == "serve" and not getattr(how.get("wish"), "prefetch", False):
            how = how | {"how": _answering(draw)}
        events.append(replace(event, how=how))
    return replace(plan, events=tuple(events))


def _answering(draw: random.Random) -> Answering:
    if draw.random() < 0.4:
        return PLAIN
    compile_s = draw.choice((None, None, 0.0, 0.01, 1.0))
    return Answering(
        stops=draw.choice((0, 2, 2, 4)),
        min_tokens=draw.choice((0, 0, 2)),
        compile_s=compile_s,
        compiles=compile_s is None or draw.random() < 0.8,
    )


def _sessions(plan: Plan, draw: random.Random) -> Plan:
    """Streaming sessions go on where their last answer ended, or are to be handed off."""
    # They hold their blocks while they wait for their client, so that no cache can be reset.
    plan = _without(plan, "update_weights", "reset")
    events = [
        replace(event, how=event.how | {"session": draw.random() < 0.5})
        if event.what == "hand_off"
        else event
        for event in plan.events
    ]
    for _ in range(draw.choice((1, 2, 4))):
        engine = draw.choice(plan.engines)
        family = draw.randrange(3)
        lengths = draw.choice(((5, 8), (13, 5), (20, 2, 8), (8, 8, 8, 8)))
        how: dict[str, Any] = {
            "engine": engine.name,
            "prompts": tuple((family, length) for length in lengths),
            "tokens": draw.choice((1, 3, 4)),
            "pause": draw.choice((0.0, 0.01, 0.5)),
            "ahead": draw.random() < 0.5,
        }
        if engine.role != "kv_consumer" and draw.random() < 0.5:
            decode = draw.choice([each for each in plan.engines if each.role != "kv_producer"])
            how |= {"params": {"do_remote_decode": True}, "decode": decode.name}
        event = Event("converse", how, draw.choice((0, 10, 100)), 0)
        events.insert(draw.randrange(len(events) + 1), event)
    return replace(plan, events=_numbered(events))


def _drafts(plan: Plan, draw: random.Random) -> Plan:
    """Engines propose tokens, of which some are wrong."""
    if has_states(plan.engines[0].family):
        plan = _unhinted(plan)
    if plan.engines[0].family in _WITH_DRAFTER and draw.random() < 0.5:
        return _drafters(plan, draw)
    engines = tuple(_drafting(each, draw) for each in plan.engines)
    events = list(plan.events)
    if draw.random() < 0.5:
        # Clients wait for 300 slow steps at most.
        engines = tuple(replace(each, step_s=0.0) for each in engines)
        events = [_answering_long(each) for each in events]
    # The model of hints knows blocks by vLLM's hashes, which name no content of an adapter.
    varies = any(event.how.get("inputs") for event in events)
    sharing = [each for each in engines if each.hosts and not varies]
    if sharing and draw.random() < 0.5:
        # Blocks of answers that are pinned: they fill by several tokens a step.
        for _ in range(3):
            how = {
                "engine": draw.choice(sharing).name,
                "prompt": (draw.randrange(3), draw.choice((5, 13, 20))),
                "tokens": _LONG_ANSWER,
                "priority": 0,
                "salt": None,
                "wish": Wish({"pin_s": 600.0}, pin_s=600.0),
            }
            events.append(Event("serve", how, draw.choice((10, 100)), 0))
    return replace(plan, engines=engines, events=_numbered(events))


def _answering_long(event: Event) -> Event:
    """The same with an answer of several blocks."""
    length = event.how["prompt"][1] if event.what in ("hand_off", "serve") else LONGEST
    if length + _LONG_ANSWER > LONGEST or getattr(event.how.get("wish"), "prefetch", False):
        return event
    return replace(event, how=event.how | {"tokens": _LONG_ANSWER})


def _drafting(engine: EngineShape, draw: random.Random) -> EngineShape:
    if draw.random() < 0.2:
        return engine
    drafts = draw.choice((1, 3, 5))
    blocks = engine.blocks
    if has_states(engine.family):  # vLLM takes a block for the state after each draft
        blocks += drafts * (1 + engine.seqs)
    # vLLM schedules a request with all its drafts, or not at all.
    steps = max(engine.step_tokens, 16)
    return replace(engine, drafts=drafts, step_tokens=steps, blocks=blocks)


def _unshared(plan: Plan) -> Plan:
    """The same with engines that keep nothing for others: with drafts they share no states."""
    engines = tuple(replace(each, hosts=False, shares=False) for each in plan.engines)
    events = [event for event in plan.events if event.what != "lie"]
    return _unhinted(replace(plan, engines=engines, events=_numbered(events)))


def _drafters(plan: Plan, draw: random.Random) -> Plan:
    """All engines have the same drafter, with KV of its own."""
    family = plan.engines[0].family
    # With windows a prefill stops early, and modules read beyond where it does.
    drafters = ("mtp", "mtp", "modules") if family == "full" else ("mtp",)
    drafter, drafts = draw.choice(drafters), draw.choice((1, 2, 3))
    engines = tuple(
        replace(
            each,
            family=_WITH_DRAFTER[family],
            drafter=drafter,
            # What is read ahead of a position is compared, how many tokens are drafted is not.
            drafts=drafts if drafter == "modules" else draw.choice((1, 3)),
            step_tokens=max(each.step_tokens, 16),
            blocks=each.blocks
            + blocks_of("full", each.block_size, 1)
            + has_states(family) * 3 * (1 + each.seqs),
        )
        for each in plan.engines
    )
    # The model of hints knows blocks by vLLM's hashes, and here they have other names.
    return _unhinted(replace(plan, engines=engines))


def _kinds(plan: Plan, draw: random.Random) -> Plan:
    """Models attend to chunks, or keep the state after each block."""
    family = plan.engines[0].family
    if family in _CHUNKED:
        engines = tuple(replace(each, family=_CHUNKED[family]) for each in plan.engines)
        return replace(plan, engines=engines)
    if has_states(family) and plan.engines[0].caching:
        engines = tuple(
            replace(
                each,
                states="all",
                hosts=False,
                shares=False,
                # Each block of a prompt may keep a state.
                blocks=each.blocks + blocks_of(family, each.block_size, 0),
            )
            for each in plan.engines
        )
        events = [event for event in plan.events if event.what != "lie"]
        return _unhinted(replace(plan, engines=engines, events=_numbered(events)))
    return _drafts(plan, draw)


def _rings(plan: Plan, draw: random.Random) -> Plan:
    """Models keep the latest tokens of a request in a ring; some engines draft."""
    family = _WITH_RING.get(plan.engines[0].family, "all and a ring")
    engines = []
    for each in plan.engines:
        # A page must hold a rank's state.
        size = max(8, each.block_size) if has_states(family) else each.block_size
        blocks = blocks_of(family, size, each.blocks // groups_of(each.family))
        ranks = min(each.ranks, STATE_HEADS) if has_states(family) else each.ranks
        changed = replace(each, family=family, block_size=size, blocks=blocks, ranks=ranks)
        engines.append(changed)
    plan = replace(plan, engines=tuple(engines))
    # The model of hints takes each group for one whose blocks are kept.
    return _drafts(_unhinted(plan), draw) if draw.random() < 0.5 else _unhinted(plan)


def _beside(plan: Plan, draw: random.Random) -> Plan:
    """Another connector stands beside ours, and loads what we never hear of."""
    if has_states(plan.engines[0].family):  # it restores positions
        return _apart(plan, draw)
    places = draw.choice((("before",), ("after",), ("before", "after", "")))
    engines = tuple(
        replace(
            each,
            beside=draw.choice(places),
            runner=draw.choice(("v1", "v2")),
            overlap=each.overlap and draw.random() < 0.5,
        )
        for each in plan.engines
    )
    trouble = plan.trouble | {"other_often": float(draw.choice((20, 50, 100)))}
    if draw.random() < 0.5:
        trouble["other_later"] = 1.0
    fails = draw.choice((0.1, 0.5)) if draw.random() < 0.5 else 0.0
    if fails:
        trouble["other_fails"] = fails
    if fails and "other_later" not in trouble:
        # Where a load fails within the step, vLLM leaves wrong blocks in its own prefix cache:
        # those that other requests have filled behind the failed ones, and those of a request that
        # is aborted in that step. Its own answers are not judged then; or they come one by one and
        # stay, or nothing is cached.
        share = any(each.shares for each in engines)
        if share and draw.random() < 0.5:
            trouble["other_spoils"] = 1.0
        elif share and draw.random() < 0.5:
            engines = tuple(replace(each, seqs=1) for each in engines)
            plan = replace(plan, events=_numbered(_without_aborts(plan.events)))
        else:
            engines = tuple(
                replace(each, caching=False, shares=False, hosts=False) for each in engines
            )
            plan = _without(plan, "lie")
            if groups_of(engines[0].family) == 1:
                trouble |= {"other_fails": 0.5, "other_often": 100.0}
                plan = replace(plan, events=_numbered(_leaving_twins(plan, draw)))
    return _unhinted(replace(plan, engines=engines, trouble=trouble))


def failing_beside(plan: Plan, draw: random.Random) -> Plan:
    """The same with another connector beside ours at the first engine, of whose loads many fail,
    for some of the plans whose engines share; the plan itself for the others. What requests go on
    with there, and leave in vLLM's cache, must not come to other engines.

    Args:
        draw: of this, and of nothing else.
    """
    fits = all(
        each.caching
        and (each.hosts or each.shares)
        and each.family in ("full", "latent")
        and not (each.beside or each.drafts or each.stages)
        for each in plan.engines
    )
    varies = any(event.how.get("inputs") for event in plan.events)
    if draw.random() >= _FAILING_OFTEN or varies or not fits:
        return plan
    first, other = plan.engines[:2]
    policies: tuple[Policy, ...] = ("fail", "recompute")
    policy = draw.choice(policies)
    engines = tuple(
        replace(
            each,
            role="kv_both",
            beside="" if each is other else draw.choice(("before", "after")),
            ranks=first.ranks,
            block_size=first.block_size,
            blocks=blocks_of(each.family, first.block_size, draw.choice((4, 20))),
            slots=40,
            step_tokens=32,
            # Who computes a failed load anew takes several steps, beside those who go on; or vLLM
            # ends all of them.
            long_prefill=8 if policy == "recompute" else 0,
            policy=policy,
            runner=draw.choice(("v1", "v2")),
            overlap=False,
            seqs=8,
            step_s=0.0,
        )
        for each in (first, other)
    )
    happens: list[tuple[int, dict[str, Any]]] = []
    for family in (0, 1, 2, 0, 1, 2):
        for _ in range(3):
            prompt = family, draw.choice((20, 33, 37))
            happens.append((draw.choice((0, 0, 3)), serve(first.name, prompt)))
        prompt = family, draw.choice((37, 50))
        for each in ((family, draw.choice((5, 20, 37))), prompt):
            happens.append((draw.choice((3, 30, 100)), serve(first.name, each)))
        happens.append((draw.choice((100, 300)), serve(other.name, prompt)))
    events = tuple(Event("serve", how, acts, i) for i, (acts, how) in enumerate(happens))
    trouble = {"other_often": 100.0, "other_fails": draw.choice((0.5, 0.8)), "other_spoils": 1.0}
    return _unhinted(replace(plan, engines=engines, events=events, pace=0.0002, trouble=trouble))


def _leaving_twins(plan: Plan, draw: random.Random) -> list[Event]:
    """Of two prefills of one prompt, which share copies, the client of the first leaves at once."""
    events = list(plan.events)
    prefills = [each.name for each in plan.engines if each.role != "kv_consumer"]
    decodes = [each.name for each in plan.engines if each.role != "kv_producer"]
    for family in (0, 1, 2, 0, 1):
        prompt = family, draw.choice((13, 20, 33))
        how = hand_off(draw.choice(prefills), draw.choice(decodes), prompt)
        how |= {"prefills": 2, "leaves": True, "tokens": 8}
        events.insert(0, Event("hand_off", how, draw.choice((0, 100, 300)), 0))
    return events


def _without_aborts(events: Sequence[Event]) -> list[Event]:
    staying = [each for each in events if each.what != "abort"]
    return [
        replace(each, how={**each.how, "leaves": False}) if each.how.get("leaves") else each
        for each in staying
    ]


FEATURES: Final[tuple[Callable[[Plan, random.Random], Plan], ...]] = (
    _full_pool,
    _ranks,
    _apart,
    _ends,
    _sessions,
    _drafts,
    _kinds,
    _rings,
    _beside,
)


def _unhinted(plan: Plan) -> Plan:
    """The same without hints, whose model does not know of what the feature brings."""
    return replace(
        plan,
        events=tuple(
            replace(event, how={name: each for name, each in event.how.items() if name != "wish"})
            for event in plan.events
        ),
    )


def _without(plan: Plan, *kinds: str) -> Plan:
    """The same without events of these kinds."""
    return replace(plan, events=_numbered([each for each in plan.events if each.what not in kinds]))


def _numbered(events: list[Event]) -> tuple[Event, ...]:
    return tuple(replace(event, number=number) for number, event in enumerate(events))
