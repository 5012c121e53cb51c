# SPDX-License-Identifier: Apache-2.0
"""The clients of a simulation: what they send, what answers they expect, and when they leave."""

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from vllm.v1.engine import FinishReason

from omni_connector.handoff.serving import UNSERVED
from omni_connector.prefix.hints import KEYS
from tests import inspection
from tests.simulation.deployment import Deployment
from tests.simulation.engines.answering import PLAIN, Answering
from tests.simulation.engines.engine import SimulatedEngine
from tests.simulation.hints import NO_WISH, Wish
from tests.simulation.inputs import NOTHING, Inputs, remove_adapters, write_adapter
from tests.simulation.plan import Plan
from tests.simulation.promises import Promises, nothing_useless_is_stored
from tests.simulation.refusals import Handed
from tests.simulation.surroundings.world import Violation
from tests.simulation.waiting import (
    Asking,
    Listed,
    Loads,
    Waiters,
    being_saved,
    leases_hold,
)

WANTED: Final = {"do_remote_decode": True}
HANDOFF: Final = {**WANTED, "do_remote_prefill": False}

TIMEOUT_S: Final = 90.0
"""Seconds in which a request must end: the connector's timeouts, and the time in a queue."""


_REMEMBERED: Final = 4
"""Requests that have ended whose ids may be used again."""

_OTHER_VERSION: Final = 100
"""Added to an adapter's version, another one than it gets by being written anew."""

_IN_USE_S: Final = 0.01
"""Seconds between two tries to replace an adapter that is in use."""


@dataclass(eq=False)
class Sent:
    """A request that a client has sent.

    Attributes:
        engine: the engine it was sent to; one that is started later under its name is another.
        deadline: when it must have ended.
        done: called with its end: `kv_transfer_params` of the answer, and whether it went well.
        answer: tokens, as far as they have come.
        plain: whether it wants nothing handed off, so that nothing that goes wrong can end it.
        wish: what it asks of the prefix cache.
        may_fail: whether it is such that vLLM itself ends it with an error.
        late: whether its hand-off may be decided later than it arrives, as that of one with an
            adapter.
    """

    request_id: str
    engine: SimulatedEngine
    max_tokens: int
    deadline: float
    done: Callable[[Any, bool], None]
    plain: bool = False
    wish: Wish = NO_WISH
    may_fail: bool = False
    late: bool = False
    tokens: int = 0
    answer: list[int] = field(default_factory=list)
    ended: bool = False
    aborted: bool = False


class Clients(Deployment):
    """Sends requests to the engines, and checks that each ends as it should.

    Args:
        plan: see `Deployment`.

    Attributes:
        sent: the requests that have not ended, by id.
        intents: how many clients are about to send something.
        stalls: how often vLLM itself did not go on, until a client gave up.
        lingers: whether there may be hand-offs that nobody claims.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.sent: dict[str, Sent] = {}
        self.intents = 0
        self.stalls = 0
        self.lingers = False
        self._thinking: list[Callable[[], None]] = []
        self._leaving: set[str] = set()
        self._numbers = itertools.count()
        # Requests that have ended, with the owner of their engine. Others may get their ids.
        self._over: deque[tuple[str, str | None]] = deque(maxlen=_REMEMBERED)
        self._adapters: dict[int, int] = {}  # how often their files were written anew
        remove_adapters()
        for event in plan.events:
            for inputs in (event.how.get("inputs"), event.how.get("decoded")):
                if inputs is not None and inputs.adapter:
                    write_adapter(inputs.adapter, 0)

    def overdue(self) -> Sent | None:
        """A request that is past its deadline; None where there is none."""
        now = self.world.now - self.lag
        return next((each for each in self.sent.values() if now > each.deadline), None)

    def give_up(self, sent: Sent) -> None:
        """A client gets no answer, and aborts its request."""
        self.stalls += 1
        self.world.tell(f"vLLM at {sent.engine.name} stalls; the client of {sent.request_id} goes")
        self._gone(sent)
        for other in self.sent.values():  # the stall has held these up, too
            if other.engine is sent.engine:
                other.deadline = self._deadline()

    def _deadline(self) -> float:
        return self.world.now - self.lag + TIMEOUT_S + self._slack

    def _look(
        self,
        engine: SimulatedEngine,
        waiters: Waiters,
        asking: Asking,
        loads: Loads,
        listed: Listed,
        promises: Promises,
    ) -> None:
        name = engine.name
        if not engine.halves or engine not in (self.engines.get(name), self.leaving.get(name)):
            return
        half = engine.halves[0]
        service = inspection.serving(half).service()
        if service.role not in (*service.roles, None):
            raise Violation("impossible_role", f"{name} has the role {service.role}")
        if engine.begins and inspection.awaits_first_weights(half):
            raise Violation("computed_early", f"{name} does not know its weights yet")
        waiters.look(half)
        asking.look(half)
        loads.look(half)
        listed.look(*engine.halves)
        promises.look(half, listed.names, self.shelf.entries)
        nothing_useless_is_stored(half, self.shelf.entries)
        self._leave(half)
        if not (self.excuses or self.voids):
            owners = {e.shape.name: e.halves[0] for e in self.engines.values() if e.halves}
            leases_hold(name, half, owners)

    def _leave(self, half: Any) -> None:
        """Abort the requests of clients that leave as soon as their KV is being copied."""
        for request_id in being_saved(half) if self._leaving else ():
            if request_id not in self._leaving:
                continue
            self._leaving.discard(request_id)
            if sent := self.sent.get(request_id):
                self.world.tell(f"the client of {request_id} goes away, whose KV is being copied")
                self._gone(sent)

    def _send(
        self,
        engine: str,
        prompt: tuple[int, int],
        max_tokens: int,
        done: Callable[[Any, bool], None] = lambda params, well: None,
        wish: Wish = NO_WISH,
        how: Answering = PLAIN,
        session: str | None = None,
        handed: Handed | None = None,
        more: Sequence[int] = (),
        **options: Any,
    ) -> Sent | None:
        target = self.engines.get(engine)
        if target is None:  # it is down, and the client is told so
            done(None, False)
            return None
        request_id = session or self._used_id(target) or f"r{next(self._numbers)}"
        params = options.get("params")
        what = ""
        if params is not None:
            what = " to be handed off" if params.get("do_remote_decode") else " prefilled elsewhere"
        if options.get("inputs", NOTHING) != NOTHING:
            what += f" with {options['inputs']}"
        if wish is not NO_WISH:
            what += f" with {str(wish.said)[:50]}"
            self.wishes.given[request_id] = wish
            options["params"] = {**(params or {}), KEYS[len(self.sent) % 2]: wish.said}
        if params is not None:
            self.wishes.handed.add(request_id)
        if how is not PLAIN:
            options["how"] = how
            what += f" ({how})"
        if session is not None:
            options["resumable"] = True
            what += " of a session"
        self.refusals.sent(request_id, handed, engine)
        family, length = prompt
        if more:
            what += f", and {len(more)} more,"
        self.world.tell(
            f"{request_id}: {length} tokens of text {family}{what} go to {engine}, "
            f"{max_tokens} wanted"
        )
        sent = Sent(request_id, target, max_tokens, self._deadline(), done, params is None, wish)
        fails = self.plan.trouble.get("other_fails", 0.0) > 0 and target.shape.policy == "fail"
        sent.may_fail = not how.compiles or (fails and bool(target.shape.beside))
        sent.late = bool(options.get("inputs", NOTHING).adapter)
        self.sent[request_id] = sent
        target.submit(request_id, [*text(family, length), *more], max_tokens, **options)
        return sent

    def _used_id(self, engine: SimulatedEngine) -> str | None:
        """The id of a request of this engine that has ended a moment ago, or None."""
        if not self.world.chance(self.plan.trouble.get("ids_again", 0.0)):
            return None
        for request_id, owner in reversed(self._over):
            mine = owner == engine.owner and request_id not in self.sent
            if mine and engine.has_forgotten(request_id):
                self._over.remove((request_id, owner))
                return request_id
        return None

    def _answered(
        self, owner: str, request_id: str, tokens: list[int], reason: Any, params: Any
    ) -> None:
        sent = self.sent.get(request_id)
        if sent is None:  # aborted
            self.lingers = self.lingers or bool(params)
            return
        sent.tokens += len(tokens)
        sent.answer += tokens
        shape = sent.engine.shape
        fetches = sent.wish.prefetch and sent.plain and shape.role and shape.hosts
        if fetches and sent.tokens > 1:
            raise Violation("hint_ignored", f"{request_id} only fetches, and answers on")
        if reason is None:
            return
        self._drain_is_obeyed(sent, params)
        del self.sent[request_id]
        self._over.append((sent.request_id, sent.engine.owner))
        sent.ended = True
        well = reason in (FinishReason.LENGTH, FinishReason.STOP)
        self.world.tell(f"{request_id} ends: {reason}, {sent.tokens} tokens")
        # An operator may reset a prefill engine while a decode engine reads its KV.
        void = self.voids and sent.engine.shape.policy == "fail"
        excused = sent.aborted or sent.may_fail
        if not (well or excused or ((self.excuses or void) and not sent.plain)):
            raise Violation(
                "request_failed", f"{request_id} ends with {reason} although nothing went wrong"
            )
        sent.done(params, well)

    def _drain_is_obeyed(self, sent: Sent, params: Any) -> None:
        """An engine that drains, or only decodes, offers no hand-offs, and any other refuses none
        as if it did."""
        if not params or sent.late:
            return
        before, after = sent.engine.offer_refusals[sent.request_id]
        refused = params.get("omni_no_handoff")
        who = f"{sent.engine.name}, {sent.request_id}"
        if params.get("do_remote_prefill") and before is not None and before == after:
            raise Violation("offers", f"{who}: a hand-off although {before}")
        if refused in UNSERVED and refused not in (before, after):
            raise Violation("refused", f"{who}: {refused}, which it is not")

    def _gone(self, sent: Sent) -> None:
        sent.aborted = True
        self.refusals.left(sent.request_id)
        del self.sent[sent.request_id]
        self._over.append((sent.request_id, sent.engine.owner))
        sent.engine.abort(sent.request_id)

    def _lost(self, engine: SimulatedEngine) -> None:
        for sent in [sent for sent in self.sent.values() if sent.engine is engine]:
            del self.sent[sent.request_id]
            sent.done(None, False)

    def abort_all(self, engine: SimulatedEngine) -> None:
        """End all requests of an engine, and tell their clients."""
        for sent in list(self.sent.values()):
            if sent.engine is engine:
                self._gone(sent)  # the engine may have yet to take it in
        engine.abort_all()

    # Events of a plan

    def serve(
        self,
        engine: str,
        prompt: tuple[int, int],
        tokens: int,
        priority: int,
        wish: Wish = NO_WISH,
        salt: str | None = None,
        inputs: Inputs = NOTHING,
        how: Answering = PLAIN,
        next_at: str | None = None,
        afresh: bool = False,
    ) -> None:
        """A client sends a request without hand-off.

        Args:
            afresh: whether vLLM computes its whole prompt, whatever its cache has.
            next_at: the engine at which the client goes on after the answer; None: it does not.
        """

        def answered(params: Any, well: bool) -> None:
            if next_at is not None and well and sent is not None:
                self._send(next_at, prompt, 3, more=[*sent.answer, 3], priority=priority)

        sent = self._send(
            engine,
            prompt,
            tokens,
            answered,
            wish=wish,
            salt=salt or inputs.salt,
            inputs=inputs,
            priority=priority,
            how=how,
            afresh=afresh,
        )

    def rewrite(self, number: int) -> None:
        """An operator puts other files in the place of an adapter's. Engines that have loaded it go
        on with what they have."""
        self.world.tell(f"adapter {number} is written anew")
        self._adapters[number] = self._adapters.get(number, 0) + 1
        write_adapter(number, self._adapters[number])

    def replace_adapter(
        self, engine: str, number: int, prompts: tuple[tuple[int, int], ...]
    ) -> None:
        """An operator has an engine load other files in the place of an adapter, as soon as no
        request there uses it, and then puts the former files back for the other engines. A client
        has the engine compute these prompts afresh with the adapter, one after the other."""
        target = self.engines.get(engine)
        if target is None:
            return
        self.voids = True
        self.intents += 1

        def load() -> None:
            if target.uses_adapter(number):
                self.world.later(_IN_USE_S, again)
                return
            self.world.tell(f"{engine} loads other files in the place of adapter {number}")
            former = self._adapters.get(number, 0)
            write_adapter(number, former + _OTHER_VERSION)
            target.replace_adapter(number)
            write_adapter(number, former)
            self.world.later(_IN_USE_S, lambda: ask(0))

        def ask(place: int) -> None:
            self.intents -= place == 0
            if place < len(prompts):
                inputs = Inputs(adapter=number)
                self._send(
                    engine,
                    prompts[place],
                    1,
                    lambda *_: ask(place + 1),
                    inputs=inputs,
                    afresh=True,
                )

        def again() -> None:
            if not target.alive:
                self.intents -= 1
                return
            loads: list[bool] = []

            def called() -> None:
                loads.append(True)
                load()

            target.call(called)
            self.world.later(_IN_USE_S, lambda: unheard(loads))

        def unheard(loads: list[bool]) -> None:  # its device may have failed meanwhile
            if loads:
                return
            if target.alive:
                self.world.later(_IN_USE_S, lambda: unheard(loads))
            else:
                self.intents -= 1

        again()

    def converse(
        self,
        engine: str,
        prompts: tuple[tuple[int, int], ...],
        tokens: int,
        pause: float,
        ahead: bool,
        params: Any = None,
        decode: str | None = None,
        salt: str | None = None,
    ) -> None:
        """A client opens a streaming session: each prompt goes on where the answer before ended.

        Args:
            tokens: of each answer.
            pause: seconds between an answer and the next prompt.
            ahead: whether the end of the session is told with its last prompt.
            params: of its first prompt.
            decode: where the client goes on with the first prompt if it is handed off.
            salt: of the first prompt, and so of all.
        """
        session = f"r{next(self._numbers)}"

        def end(target: SimulatedEngine) -> None:
            target.submit(session, [0], 1)

        def speak(number: int) -> None:
            def answered(answer: Any, well: bool) -> None:
                if not well:
                    return
                if answer and decode is not None:
                    self._send(decode, prompts[0], tokens, params=dict(answer))
                if number + 1 < len(prompts):
                    self.intents += 1

                    def go_on() -> None:
                        self.intents -= 1
                        speak(number + 1)

                    self.world.later(pause, go_on)
                elif sent is not None and not ahead:
                    end(sent.engine)

            last = number + 1 == len(prompts)
            given: dict[str, Any] = (
                {"params": dict(params)} if params is not None and number == 0 else {}
            )
            given |= {"salt": salt, "session": session}
            sent = self._send(engine, prompts[number], tokens, answered, **given)
            if sent is not None and last and ahead:
                end(sent.engine)

        speak(0)

    def hand_off(
        self,
        prefill: str,
        decode: str,
        prompt: tuple[int, int],
        tokens: int,
        times: int,
        again: int,
        prefills: int,
        pause: float,
        priority: int,
        mixed_up: bool,
        leaves: bool,
        rejected: bool,
        passed_on: bool = False,
        wish: Wish = NO_WISH,
        salt: str | None = None,
        inputs: Inputs = NOTHING,
        decoded: Inputs | None = None,
        answers: int = 1,
        prefill_how: Answering = PLAIN,
        decode_how: Answering = PLAIN,
        session: bool = False,
    ) -> None:
        """Clients have a prompt prefilled by one engine and decoded by another.

        Args:
            times: decode requests that share the hand-off, as the children of n > 1 do.
            again: how often the first decode request is sent again after it has ended.
            prefills: clients that send the same prefill request at once.
            pause: seconds between the prefill and the decode request.
            mixed_up: whether the decode request has another prompt.
            leaves: whether the first client aborts its prefill while the KV is being copied.
            rejected: whether the decode engine's server refuses the last decode request. vLLM then
                passes on a prompt of one token with its params, and aborts that at once.
            passed_on: whether the first decode request is itself to be handed off, to the engine
                that prefilled.
            wish, salt: of all these requests.
            inputs: of all these requests, beside their tokens.
            decoded: those of the decode requests, where they differ.
            answers: tokens that the prefill requests ask for.
            prefill_how, decode_how: how these requests want to be answered.
            session: whether the first decode request opens a streaming session.
        """
        sender = self.engines.get(prefill)
        if sender is not None and sender.shape.drafter and prefill_how.grammar is not None:
            # A grammar may forbid the token that follows a shortened prompt. Then the drafter has
            # KV of another one there.
            prefill_how = replace(prefill_how, compile_s=None, compiles=True)
        first: dict[str, Any] = {"wish": wish, "priority": priority}
        options = first | {"inputs": inputs if decoded is None else decoded}
        options["salt"] = salt or options["inputs"].salt
        first |= {"inputs": inputs, "salt": salt or inputs.salt}
        # Nobody fetches what was computed of other inputs, or of another version of an adapter.
        self.lingers = self.lingers or mixed_up or options != first or inputs.adapter > 0
        self.lingers = self.lingers or (session and inputs != NOTHING)  # which it does not send
        asked = ((prompt[0] + 1) % 3, prompt[1]) if mixed_up else prompt
        handed = Handed(
            self.world.now,
            prefill,
            excused=mixed_up
            or rejected
            or passed_on
            or session
            or answers > 1
            or options != first  # the two requests differ
            or inputs.adapter > 0
            or prefill_how is not PLAIN
            or decode_how is not PLAIN,
        )

        def ask(left: int, params: Any) -> None:
            if left > 0:
                self._send(
                    decode,
                    asked,
                    tokens,
                    lambda *_: ask(left - 1, params),
                    params=dict(params),
                    how=decode_how,
                    handed=handed,
                    **options,
                )

        def pass_on(params: Any) -> None:
            def passed(params: Any, well: bool) -> None:
                params = {"params": dict(params)} if well and params else {}
                self._send(prefill, asked, tokens, **params, **options)

            self._send(decode, asked, 1, passed, params={**params, **WANTED}, **options)

        def prefilled(params: Any, well: bool) -> None:
            self.intents += 1

            def go_on() -> None:
                if go_on not in self._thinking:  # `hasten` has called it
                    return
                self._thinking.remove(go_on)
                self.intents -= 1
                if well and params is None:
                    raise Violation("no_answer", f"{prefill} says nothing of a hand-off")
                if not well or params is None:
                    self._send(decode, prompt, tokens, **options)
                    return
                if session:
                    parts = (asked, (asked[0], 5))
                    self.converse(decode, parts, min(tokens, 4), 0.01, False, params, salt=salt)
                    return
                if passed_on:
                    pass_on(params)
                for number in range(passed_on, times - rejected):
                    ask(1 + (again if number == 0 else 0), params)
                if rejected:
                    self._reject(decode, params)

            self._thinking.append(go_on)
            self.world.later(pause, go_on)

        for number in range(prefills):
            params = dict(HANDOFF)
            sent = self._send(
                prefill,
                prompt,
                answers,
                prefilled,
                params=params,
                how=prefill_how,
                handed=handed,
                **first,
            )
            if sent is not None and leaves and number == 0:
                self._leaving.add(sent.request_id)

    def _reject(self, engine: str, params: Any) -> None:
        target = self.engines.get(engine)
        if target is not None:
            request_id = f"r{next(self._numbers)}"
            self.world.tell(f"{request_id}: {engine} rejects a request, and passes on its params")
            target.submit(request_id, [0], 1, params=dict(params))
            target.abort(request_id)

    def abort(self, number: int) -> None:
        """A client aborts its request."""
        if self.sent:
            sent = list(self.sent.values())[number % len(self.sent)]
            self.world.tell(f"the client of {sent.request_id} goes away")
            self._gone(sent)

    def hasten(self) -> None:
        """Clients that are about to send a decode request send it now."""
        for go_on in self._thinking.copy():
            go_on()


def text(family: int, length: int) -> list[int]:
    """Token ids; of one family, a shorter text is the beginning of a longer one."""
    draw = random.Random(family)
    return [draw.randrange(3, 500) for _ in range(length)]
