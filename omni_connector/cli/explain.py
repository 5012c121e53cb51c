# SPDX-License-Identifier: Apache-2.0
"""`omni-connector explain`: where the KV of a prompt is, for each engine of a namespace."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from omni_connector.cli.explained import Answer, AskedEngine, Explanation, explained
from omni_connector.cli.namespaces import existing_folder, nobody
from omni_connector.config import OmniConfig
from omni_connector.errors import ConfigError, OmniError
from omni_connector.net.runtime import is_dead, namespace_dir
from omni_connector.net.status import plain
from omni_connector.prefix.explain import KIND, MAX_TOKENS, Tokenizer

FORMAT: Final = 1
"""Version of the JSON document. It grows when a field is removed or changes its meaning."""

_MAX_ENGINES: Final = 256
"""Most engines that are asked; it bounds the open connections."""


@dataclass(frozen=True)
class Asking:
    """A prompt to explain.

    Attributes:
        text: the prompt's text; None if `tokens` is given.
        tokens: the prompt's token ids; None if `text` is given.
        salt: cache salt of the request; None for a request without one.
        trusts_code: whether a tokenizer may run code of its own.
    """

    text: str | None
    tokens: list[int] | None
    salt: str | None
    trusts_code: bool = False

    @classmethod
    def of(
        cls,
        prompt: str | None,
        file: Path | None,
        tokens: str | None,
        salt: str | None,
        *,
        trusts_code: bool = False,
    ) -> Self:
        """Make one from the command line. A prompt or tokens of `-` are read from standard input.

        Raises:
            ConfigError: not exactly one of prompt, file and tokens is given, or it cannot be read.
        """
        if sum(each is not None for each in (prompt, file, tokens)) != 1:
            raise ConfigError("give either a PROMPT, or --file, or --tokens")
        try:
            (salt or "").encode()
            if tokens is not None:
                return cls(None, _token_ids(_standard_input() if tokens == "-" else tokens), salt)
            text = file.read_text("utf-8") if file is not None else prompt
            return cls(_standard_input() if prompt == "-" else text, None, salt, trusts_code)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"the prompt cannot be read: {error}") from error

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """The tokens of the prompt.

        Raises:
            ConfigError: there is no token, or more than `MAX_TOKENS`, or the tokenizer cannot be
                loaded.
        """
        if self.tokens is not None:
            ids = self.tokens
        else:
            try:
                ids = list(_tokenizer(tokenizer, self.trusts_code)(self.text).input_ids)
            except Exception as error:  # a tokenizer may raise any error
                raise ConfigError(
                    f"the tokenizer {plain(tokenizer.name)} cannot be used: "
                    f"{plain(str(error))[:300]}; give the prompt as --tokens"
                ) from error
        if not 1 <= len(ids) <= MAX_TOKENS:
            raise ConfigError(f"a prompt has from 1 to {MAX_TOKENS} tokens, not {len(ids)}")
        return ids


def _standard_input() -> str:
    if sys.stdin is None:
        raise ConfigError("the prompt cannot be read: standard input is closed")
    return sys.stdin.read()


def _token_ids(text: str) -> list[int]:
    text = text.strip()
    try:
        ids = msgspec.json.decode(text if text.startswith("[") else f"[{text}]", type=list[int])
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"--tokens must be token ids, such as 1,2,3 or [1, 2, 3]: {error}"
        ) from error
    if not all(0 <= each < 1 << 32 for each in ids):
        raise ConfigError("--tokens has a token id that is negative or too large")
    return ids


@cache
def _tokenizer(which: Tokenizer, trusts_code: bool) -> Callable[..., Any]:
    # The engine's answer is not trusted: it must not make this process run code, nor load files
    # from the working directory.
    if which.trust_remote_code and not trusts_code:
        raise ConfigError("it runs code of its own, which takes --trust-remote-code")
    if not os.path.isabs(which.name) and os.path.exists(which.name):
        raise ConfigError("a folder here has its name")
    if find_spec("transformers") is None:
        raise ConfigError("transformers is missing: pip install transformers")
    from transformers import AutoTokenizer

    loaded: Callable[..., Any] = AutoTokenizer.from_pretrained(
        which.name,
        revision=which.revision,
        trust_remote_code=which.trust_remote_code,
        local_files_only=True,  # the engine has loaded it
    )
    return loaded


def ask(asking: Asking, namespace: str, engine: str) -> Answer:
    """Ask the engines of a namespace whose ids begin with `engine`.

    Raises:
        ConfigError: the runtime folder is unsafe; or no engine could be asked, as `Asking.ids`
            raised for each.
    """
    found: list[Explanation] = []
    refused: list[ConfigError] = []
    with asked_engines(namespace, engine) as (chosen, asked, remarks):
        for each in chosen:
            others = [other for other in asked if other is not each]
            try:
                tokens = asking.ids(each.engine.tokenizer)
                found.append(explained(each, others, tokens, asking.salt))
            except OmniError as error:
                remarks.append(plain(f"{each.name}: {error}"))
                refused += [error] if isinstance(error, ConfigError) else []
    if refused and not found:
        raise refused[0]
    return Answer(namespace, str(namespace_dir(namespace)), time.time(), found, remarks)


@contextlib.contextmanager
def asked_engines(
    namespace: str, engine: str
) -> Iterator[tuple[list[AskedEngine], list[AskedEngine], list[str]]]:
    """Connect to the engines of a namespace in this context.

    Yields:
        Those whose ids begin with `engine`; all; and what cannot be asked, in sentences.

    Raises:
        ConfigError: the runtime folder is unsafe.
    """
    folder = existing_folder(namespace)
    asked, remarks = ([], []) if folder is None else _engines(folder)
    try:
        chosen = [each for each in asked if each.engine.engine_id.startswith(engine)]
        if not chosen:
            remarks.append(_nobody(asked, namespace, engine))
        yield chosen, asked, remarks
    finally:
        for each in asked:
            each.close()


def _nobody(asked: list[AskedEngine], namespace: str, engine: str) -> str:
    if not asked:
        who = "engine that shares prefixes"
        return nobody(namespace, who, "OmniKVConnector, and `share` or a store")
    return (
        f"No engine of namespace {plain(namespace)} that shares prefixes has an id that begins "
        f"with {plain(engine)}. There are {', '.join(each.name for each in asked)}."
    )


def _engines(folder: Path) -> tuple[list[AskedEngine], list[str]]:
    asked: list[AskedEngine] = []
    remarks: list[str] = []
    names = sorted(name for name in os.listdir(folder) if name.startswith(KIND))
    # An engine that was killed leaves its socket until the next engine starts.
    living = [name for name in names if not is_dead(folder / name)]
    for name in living[:_MAX_ENGINES]:
        try:
            asked.append(AskedEngine(folder / name))
        except OmniError as error:
            remarks.append(plain(f"{name} was not asked: {error}"))
    asked.sort(key=lambda each: each.name)
    return asked, remarks


def explain(asking: Asking, namespace: str | None, engine: str, *, as_json: bool) -> int:
    """Print where the KV of a prompt is; return the exit status.

    Args:
        asking: the prompt.
        namespace: namespace of the engines; None for the environment's.
        engine: prefix of the ids of the engines to ask.
        as_json: print a JSON document instead of tables.

    Raises:
        ConfigError: as `ask`; or rich is missing.
    """
    name = OmniConfig.load(None).namespace if namespace is None else namespace
    if not as_json and find_spec("rich") is None:
        raise ConfigError("explain needs rich: pip install 'omni-connector[cli]', or --json")
    answer = ask(asking, name, engine)
    if as_json:
        print(json.dumps({"format": FORMAT, **msgspec.to_builtins(answer)}))
    else:
        from omni_connector.cli.explain_view import show

        show(answer)
    return 0 if answer.engines else 1
