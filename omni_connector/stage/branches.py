# SPDX-License-Identifier: Apache-2.0
"""The KV that hangs on a request, and the part of it that each branch of guidance uses.

With classifier-free guidance a diffusion model computes each step several times: for the prompt,
and for branches such as `cfg_text` and `cfg_img`. The KV of branches comes with companion requests.
Where ranks share these branches, rank 0 computes the prompt and rank i the i-th branch.

KV is passed on in fields by name: those of the request, and as `sp.{name}` those of its
`sampling_params`.
"""

from collections.abc import Mapping
from typing import Any, Final

Fields = dict[str, Any]

PARAMS: Final = "sp."

BRANCH_FIELDS: Final = (f"{PARAMS}cfg_branch_roles", f"{PARAMS}cfg_active_branch")
"""Fields for the branches in the order of their ranks, and for this rank's branch, which is None
where the rank computes the prompt."""

_PRIMARY: Final = ("past_key_values", "kv_metadata")
_BRANCH_MAPS: Final = ("cfg_branch_past_key_values", "cfg_branch_kv_metadata")
_BRANCH_NAMES: Final = ("cfg_active_branch", "cfg_branch_roles", "cfg_kv_request_ids")
_ENDS: Final = ("_past_key_values", "_kv_metadata")
# The order in which vLLM-Omni's pipelines count branches.
_FIRST_ROLES: Final = ("cfg_text", "cfg_img")

# vLLM-Omni's requests of warm-up runs, which no stage has sent.
_DUMMY_ID: Final = "dummy_req_id"


def is_dummy(request_id: str | None) -> bool:
    """Whether this is a request of a warm-up run, for which no KV comes."""
    return request_id is not None and (
        request_id == _DUMMY_ID or request_id.startswith(f"{_DUMMY_ID}/")
    )


def collect(req: Any) -> Fields:
    """The KV that hangs on a request, by the names that vLLM-Omni's pipelines give it."""
    found = {name: getattr(req, name, None) for name in _PRIMARY}
    params = getattr(req, "sampling_params", None)
    for name, value in getattr(params, "__dict__", {}).items():
        if name in _PRIMARY or _is_branch(name):
            found[PARAMS + name] = value
    return {name: value for name, value in found.items() if value is not None}


def apply(req: Any, fields: Fields) -> None:
    """Set fields on a request and its `sampling_params`."""
    params = getattr(req, "sampling_params", None)
    for name, value in fields.items():
        if not name.startswith(PARAMS):
            setattr(req, name, value)
        elif params is not None:
            setattr(params, name.removeprefix(PARAMS), value)


def roles_of(fields: Fields) -> list[str]:
    """The branches that have KV, in the order of their ranks."""
    kept = _branch_map(fields, "cfg_branch_past_key_values")
    single = [
        name.removeprefix(PARAMS).removesuffix(_ENDS[0])
        for name in fields
        if name.startswith(f"{PARAMS}cfg_") and name.endswith(_ENDS[0])
    ]
    known = [role for role in [*kept, *single] if role != "cfg_branch"]
    having = [role for role in known if _kv_of(fields, role) is not None]
    first = [role for role in _FIRST_ROLES if role in having]
    return list(dict.fromkeys([*first, *having]))


def rank_payloads(fields: Fields, size: int) -> list[Fields | None]:
    """What each rank of a group that shares branches uses.

    Args:
        fields: what was received.
        size: ranks of the group.

    Returns:
        One payload for each rank. The first has the fields of the prompt, each further one has
        the fields of a branch, too. It is None for a rank without a branch, which must do without
        KV. Without any branch the first two ranks get the prompt's payload, from which the model
        makes the branch of the second.
    """
    roles = roles_of(fields)
    main = {name: value for name, value in fields.items() if not _is_branch_field(name, roles)}
    alone = dict(main)
    if roles:
        main |= dict(zip(BRANCH_FIELDS, (roles, None), strict=True))
    payloads: list[Fields | None] = [main or None]
    for role in roles:
        branch = main | {BRANCH_FIELDS[1]: role}
        for name, end, value in (
            (_BRANCH_MAPS[0], _ENDS[0], _kv_of(fields, role)),
            (_BRANCH_MAPS[1], _ENDS[1], _metadata_of(fields, role)),
        ):
            if value is not None:
                branch |= {PARAMS + name: {role: value}, f"{PARAMS}{role}{end}": value}
        payloads.append(branch)
    spare = alone or None if not roles and size == 2 else None
    payloads += [spare] * (size - len(payloads))
    return payloads[:size]


def _is_branch(name: str) -> bool:
    return name in _BRANCH_NAMES or (name.startswith("cfg_") and name.endswith(_ENDS))


def _is_branch_field(field: str, roles: list[str]) -> bool:
    name = field.removeprefix(PARAMS)
    if not field.startswith(PARAMS):
        return False
    return _is_branch(name) or any(name == role + end for role in roles for end in _ENDS)


def _branch_map(fields: Fields, name: str) -> Mapping[str, Any]:
    found = fields.get(PARAMS + name)
    return found if isinstance(found, Mapping) else {}


def _kv_of(fields: Fields, role: str) -> Any:
    found = _branch_map(fields, _BRANCH_MAPS[0]).get(role)
    return fields.get(f"{PARAMS}{role}{_ENDS[0]}") if found is None else found


def _metadata_of(fields: Fields, role: str) -> Any:
    found = _branch_map(fields, _BRANCH_MAPS[1]).get(role)
    return fields.get(f"{PARAMS}{role}{_ENDS[1]}") if found is None else found
