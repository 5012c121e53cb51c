# SPDX-License-Identifier: Apache-2.0
"""`omni-connector cache`: what the arenas of running engines hold by prompt; pins and drops it."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from omni_connector.cli.explain import asked_engines
from omni_connector.cli.explained import AskedEngine
from omni_connector.config import OmniConfig
from omni_connector.errors import ConfigError, OmniError
from omni_connector.net.status import plain
from omni_connector.prefix.cache_orders import Done, DropPrompts, KeptPrompt, PinPrompt

FORMAT: Final = 1
"""Version of the JSON documents. It grows when a field is removed or changes its meaning."""

_COLUMNS: Final = "{:<16}  {:>8}  {:>8}  {:>8}  {:>6}  {:>8}  {:<36}  {}"


def listed(namespace: str | None, engine: str, *, as_json: bool) -> int:
    """Print the prompts of which arenas have blocks; return the exit status.

    Args:
        namespace: of the engines; None for the environment's.
        engine: beginning of the ids of the engines.
        as_json: print a JSON document instead of a table.

    Raises:
        ConfigError: the runtime folder is unsafe.
    """
    name = _namespace(namespace)
    with asked_engines(name, engine) as (chosen, _, remarks):
        found = _prompts(chosen, remarks)
    if as_json:
        engines = [{"engine_id": each.name, "prompts": prompts} for each, prompts in found]
        _print_json(name, engines, remarks)
    else:
        _print_table([(each.name, prompt) for each, prompts in found for prompt in prompts])
        _tell(remarks)
    return 0 if found else 1


def pin(prompt: str, seconds: float, namespace: str | None, engine: str, *, as_json: bool) -> int:
    """Have a prompt stay in the arenas that hold it; return the exit status.

    Args:
        prompt: beginning of its name.
        seconds: for how long.
        namespace, engine, as_json: as for `listed`.

    Raises:
        ConfigError: as `listed`; or prompts of several names begin so.
    """
    return _ordered(
        prompt,
        lambda name: PinPrompt(name, seconds),
        ("pinned", "not pinned: at most a quarter of an arena is"),
        (namespace, engine),
        as_json=as_json,
    )


def drop(prompt: str | None, namespace: str | None, engine: str, *, as_json: bool) -> int:
    """Have the arenas let go of a prompt, or of all; return the exit status.

    Args:
        prompt: beginning of its name; None for all prompts.
        namespace, engine, as_json: as for `listed`.

    Raises:
        ConfigError: as `listed`; or prompts of several names begin so.
    """
    return _ordered(
        prompt,
        DropPrompts,
        ("dropped", "stay while they are copied or leased"),
        (namespace, engine),
        as_json=as_json,
    )


def move(prompt: str, to: str, namespace: str | None, engine: str, *, as_json: bool) -> int:
    """Have an engine copy a prompt to its own arena, and drop it where it was; return the exit
    status.

    Args:
        prompt: beginning of its name.
        to: beginning of the id of the engine that shall have it.
        namespace, as_json: as for `listed`.
        engine: beginning of the ids of the engines that it may be taken from.

    Raises:
        ConfigError: as `listed`; or prompts of several names, or ids of several engines begin so.
    """
    done: list[dict[str, Any]] = []
    name = _namespace(namespace)
    with asked_engines(name, "") as (_, asked, remarks):
        targets = [each for each in asked if each.engine.engine_id.startswith(to)]
        if len(targets) != 1:
            raise ConfigError(f"{len(targets)} engines have ids that begin with {plain(to)}")
        [target] = targets
        sources = [
            each
            for each in asked
            if each is not target and each.engine.engine_id.startswith(engine)
        ]
        full, holders = _named(prompt, _prompts(sources, remarks))
        if full is None:
            remarks.append(f"No other arena has a prompt whose name begins with {plain(prompt)}.")
        for source in holders:
            assert full is not None
            try:
                moved = target.bring(full, source)
                if not moved.blocks or moved.others:
                    remarks.append(
                        f"{target.name} did not get {moved.others} blocks of {source.name}, which "
                        "keeps them: it reads no arena of another model or other weights, and has "
                        "bounded room"
                    )
                    continue
                dropped = source.obey(DropPrompts(full))
                done.append({"engine_id": target.name, "blocks": moved.blocks})
                done.append({"engine_id": source.name, "dropped": dropped.blocks})
            except OmniError as error:
                remarks.append(plain(f"{source.name}: {error}"))
    if as_json:
        _print_json(name, done, remarks)
    else:
        for each in done:
            what = "has" if "blocks" in each else "dropped"
            print(f"{each['engine_id']}: {what} {each.get('blocks', each.get('dropped'))} blocks")
        _tell(remarks)
    return 0 if done and not remarks else 1


def _ordered(
    prompt: str | None,
    order: Callable[[Any], PinPrompt | DropPrompts],
    words: tuple[str, str],
    where: tuple[str | None, str],
    *,
    as_json: bool,
) -> int:
    done: list[tuple[AskedEngine, Done]] = []
    name = _namespace(where[0])
    with asked_engines(name, where[1]) as (chosen, _, remarks):
        full, holders = None, chosen
        if prompt is not None:
            full, holders = _named(prompt, _prompts(chosen, remarks))
            if not holders and chosen:
                remarks.append(f"No arena has a prompt whose name begins with {plain(prompt)}.")
        for each in holders:
            try:
                done.append((each, each.obey(order(full))))
            except OmniError as error:
                remarks.append(plain(f"{each.name}: {error}"))
    if as_json:
        engines = [
            {"engine_id": each.name, "blocks": answer.blocks, "others": answer.others}
            for each, answer in done
        ]
        _print_json(name, engines, remarks)
    else:
        for each, answer in done:
            rest = f", {answer.others} {words[1]}" if answer.others else ""
            print(f"{each.name}: {answer.blocks} blocks {words[0]}{rest}")
        _tell(remarks)
    return 0 if done and not remarks else 1


def _prompts(
    engines: Sequence[AskedEngine], remarks: list[str]
) -> list[tuple[AskedEngine, list[KeptPrompt]]]:
    """The prompts of each engine that answers; `remarks` takes the others."""
    found = []
    for each in engines:
        try:
            found.append((each, each.prompts()))
        except OmniError as error:
            remarks.append(plain(f"{each.name}: {error}"))
    return found


def _named(
    beginning: str, found: Sequence[tuple[AskedEngine, list[KeptPrompt]]]
) -> tuple[str | None, list[AskedEngine]]:
    """The name that begins so, and the engines that have the prompt.

    Raises:
        ConfigError: there are several.
    """
    names = {prompt.name for _, prompts in found for prompt in prompts}
    names = {each for each in names if each.startswith(beginning)}
    if len(names) > 1:
        several = ", ".join(sorted(names)[:5])
        raise ConfigError(f"{len(names)} prompts have names that begin with {beginning}: {several}")
    holders = [each for each, prompts in found if names & {prompt.name for prompt in prompts}]
    return next(iter(names), None), holders


def _print_table(rows: Sequence[tuple[str, KeptPrompt]]) -> None:
    print(_COLUMNS.format("NAME", "TOKENS", "KEPT", "AGE", "HITS", "PINNED", "ENGINE", "REQUEST"))
    for engine, each in rows:
        pinned = f"{each.pinned:.0f} s" if each.pinned else "-"
        age = f"{each.age:.0f} s"
        print(
            _COLUMNS.format(
                *(each.name, each.tokens, each.kept, age, each.hits, pinned),
                *(engine, plain(each.request)),
            ).rstrip()
        )


def _print_json(namespace: str, engines: list[dict[str, Any]], remarks: list[str]) -> None:
    document = {"format": FORMAT, "namespace": namespace, "engines": engines, "remarks": remarks}
    print(json.dumps(msgspec.to_builtins(document)))


def _tell(remarks: Sequence[str]) -> None:
    for each in remarks:
        print(f"omni-connector: {each}", file=sys.stderr)


def _namespace(given: str | None) -> str:
    return OmniConfig.load(None).namespace if given is None else given
