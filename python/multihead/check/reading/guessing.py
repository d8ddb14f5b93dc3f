# SPDX-License-Identifier: MIT
"""What was made up for a call is never the code's fault: what follows from it."""

import re
from dataclasses import replace

from ..calls.cases import Case
from ..calls.construct import Construction
from ..capture.record import Recorder
from ..capture.runner import Run, Runner
from ..report import Finding
from ..sandbox.guard import is_of_arguments
from ..subject.roles import SIZES, TENSORS
from ..subject.signature import Call
from ..subject.words import words

_STATE = (
    "State it: check a function that calls it with them filled in, "
    "`lambda q, k, v: attend(q, k, v, ...)`, or give a call of yours by `inputs=` or "
    "`call=`."
)
# What Python or PyTorch says of a call that is written wrongly in the code itself.
_MISCALLED = re.compile(
    r"TypeError: .*(takes (from )?\d.* positional arguments? but|"
    r"got an unexpected keyword argument|missing \d+ required positional|"
    r"got multiple values for argument|"
    r"argument '\w+' \(position \d+\) must be (int, not (tuple|list|str)|"
    r"Tensor, not (int|float|bool)))"
)
# The same, whatever it is called with.
_IMPOSSIBLE = re.compile(
    r"TypeError: 'torch.Size' object is not callable|"
    # A module, and not what was given for an argument, is made a buffer.
    r"TypeError: cannot assign '[\w.]*\.\w+' object to buffer '\w+'|"
    # What has become an attribute is then made a buffer or a parameter of that name.
    r"KeyError: \"attribute '\w+' already exists\"|"
    # A class inherits from nn.Module(), an instance.
    r"TypeError: Module\.__init__\(\) takes 1 positional argument but 4 were given|"
    # super() of another class than its own.
    r"TypeError: super\(type, obj\): obj must be an instance or subtype of type|"
    r"ValueError: Fan in and fan out can not be computed"
)
# Kinds of attention that are not judged, as names have them.
_OF_KINDS = {"sparse", "axial", "linear", "linformer", "performer", "nystrom", "lsh"}
_OF_KINDS |= {"nystromformer", "reformer", "prob", "deformable", "additive", "bahdanau"}
_OF_KINDS |= {"dilated", "longformer", "routing", "sinkhorn", "retention", "infini"}
_OF_OTHERS = re.compile(
    r"sinkhorn|differential|decay|retention|gumbel|hard(?=[- ]?attention)|hopfield|entmax|"
    r"sparsemax|cosformer|co-?(?=attention)|c2q|q2c|bidaf|cq(?=attention)|straight-through|"
    r"style[- ]?aligned|prefix[-_ ]?(?:lm|causal|len)",
    re.I,
)
OF_LARGEST = "attention to the largest scores alone"
_UNEXPECTED = re.compile(r"TypeError: .*got an unexpected keyword argument '(\w+)'")
_SHOW = "Give a call of yours, which it takes, by `inputs=` or `call=`."
UNSEEN = Finding(
    "positions_unseen",
    "It computes with positions, and NumPy does not show what it makes of them: what "
    "else it does is not explained without them.",
    "Check the same code in PyTorch, or attention without positions.",
    kind="unchecked",
)
# What is wrong with code whatever it is called with.
_OF_THE_PROGRAM = ("changes_global_state", "changes_inputs", "random", "prints")


def kinds(call: Call, construction: Construction | None) -> dict[str, str]:
    """The arguments whose value is made up, and what it is, as the engine calls it:
    "number", "nothing" (None, 0, False), "mask", "layer", or "order" of the sequences."""
    found = {}
    tensors = [name for name in call.guessed if call.roles.get(name) in TENSORS]
    for name in call.guessed:
        role = call.roles.get(name)
        if role in TENSORS:
            found |= {name: "order"} if len(tensors) > 1 else {}
        elif role in SIZES:
            found[name] = "number"
        else:
            found[name] = "mask" if role in ("mask", "padding") else "nothing"
    for name in construction.guessed if construction else ():
        role = construction.roles[name]
        if role != "config":  # it answers the usual names alone
            other = "mask" if "mask" in words(name) else "nothing"
            found[name] = "number" if role in SIZES else other
        if role == "layer":
            found[name] = role
    if construction:  # what it reads of its configuration
        found |= dict.fromkeys(construction.blind, "nothing")
    return found


_OF_A_CONTEXT = {"context", "cross", "decoder"}


def ignores_context(base: Run, runner: Runner) -> bool:
    """Whether a context that may be left out has no part in the output, and a setting
    that is off decides that."""
    name, built = runner.call.parameter("context"), runner.construction
    given = [p for p in runner.call.parameters if p.name == name and p.default is None]
    if not given or built is None or base.case.relation == "self":
        return False
    switches = [
        p
        for p in built.parameters
        if p.default in (None, False) and set(words(p.name)) & _OF_A_CONTEXT
    ]
    met = base.recorder.origin(base.out).inputs
    return bool(switches) and "query" in met and "key" not in met


def asks(base: Run) -> bool:
    """Whether the queries have a part in the output."""
    return "query" in base.recorder.origin(base.out).inputs


def without_context(call: Call) -> Call:
    name = call.parameter("context")
    said = f"{name}, which it ignores as it is built, is left out"
    alone = replace(call, roles={**call.roles, name: None})
    alone.guesses = [*call.guesses, said]
    alone.settle_style()
    return alone


def doubt(made_up: dict[str, str], faults: list[str]) -> Finding:
    """What is said in place of a verdict that may come of what was made up."""
    named = " and ".join(faults)
    seems = f"seems to have the fault {named}" if faults else "is not attention"
    return Finding(
        "argument_guessed",
        f"{_unknown(made_up)}, and with a guess it {seems}, which may come of that.",
        _STATE,
        kind="unchecked",
    )


def other_layers(unread: list[str]) -> Finding:
    """What is said where more than attention is in the way of the data."""
    names = " and ".join(f"`{name}`" for name in unread) or "something"
    return Finding(
        "other_layers",
        f"It has {names}, too, which attention has no use for: what these do is not "
        "known, and without them it is not attention.",
        "Check the part that is attention by itself, or split it off.",
        kind="unchecked",
    )


def outside(
    seen: Recorder, case: Case | None = None, name: str = "", doc: str = ""
) -> Finding | None:
    """What is said of attention of another kind, which nothing here can explain. case:
    that of the run, where its sizes are understood; name: that of the code; doc: what it
    says of itself."""
    said = words(name)
    is_named = said[-1:] in (["attention"], ["attn"]) and "projection" not in said
    kinds = [word for word in said if word in _OF_KINDS] if is_named else []
    others = _OF_OTHERS.findall(name) or _OF_OTHERS.findall(doc)
    if not seen.has_softmax:
        lacks = "no softmax"
    elif not seen.has_scores:
        lacks = "no product of queries and keys"
    elif case is not None and _is_of_features(seen, case):
        lacks = "weights of features, not of keys"
    elif seen.cores.sums.is_cut:
        lacks = "one softmax over what is read in parts"
    elif seen.chooses:
        lacks = OF_LARGEST
    elif kinds:
        lacks = f"what its name calls {kinds[0]} attention"
    elif others:
        lacks = f"{others[0].lower()} attention, as it says"
    else:
        return None
    return of_another_kind(lacks)


def of_another_kind(lacks: str) -> Finding:
    return Finding(
        "outside",
        f"It computes {lacks}, and no fault that is known here explains the rest: "
        "attention of another kind, such as linear or additive attention, is not "
        "judged.",
        "Compare it with code of its own kind.",
        kind="unchecked",
    )


def _is_of_features(seen: Recorder, case: Case) -> bool:
    sizes = case.sizes
    widths = {sizes.head_dim, sizes.embed} - {sizes.queries, case.keys, sizes.heads}
    if any(core.query.shape[-1] in widths for core in seen.cores.found):
        return False  # positions and one token, which may be as many as features
    return bool(seen.softmaxes) and all(set(s) <= widths for s in seen.softmaxes)


OF_UNKNOWN_AXES = Finding(
    "not_called",
    "Nothing says which of the four axes of its input are items and which positions.",
    "Check it without inputs of yours, so that calls of several layouts are tried.",
    kind="unchecked",
)


def of_calls(found: list[Finding], made_up: dict[str, str]) -> list[Finding]:
    """Findings of calls: what may come of what was made up is none of the code's."""
    return [
        replace(f, kind="unchecked", remedy=_STATE)
        if made_up and f.kind == "failure" and f.name not in _OF_THE_PROGRAM
        else f
        for f in found
    ]


def of_no_call(
    said: list[Finding], guessed: list[str], kind: str, source: str
) -> list[Finding]:
    """Why no call returned an output. That is the code's fault only where no argument
    can bring it about, or where it returns something else and nothing was guessed.
    kind: the name of the code's type; source: its text."""
    if not said or said[0].name != "raises":
        return of_calls(said, dict.fromkeys(guessed, ""))
    # A case of several, none of which is that of what was guessed; or a layer that was
    # handed for another, which holds itself.
    errors = ("UnboundLocalError", "RecursionError", "It ends the program")
    unclear = bool(guessed) and said[0].sentence.startswith(errors)
    if not unclear and (not is_of_arguments(said) or _is_own(said[0], kind, source)):
        return said
    if _is_inside(said[0]) and _is_mistaken(said[0], bool(guessed), source):
        return said
    if not guessed:
        return [replace(f, kind="unchecked", remedy=f.remedy or _SHOW) for f in said]
    sentence = (
        f"{_unknown(guessed)}, and every call that was tried with a guess raises. "
        f"{said[0].sentence}"
    )
    return [Finding("not_called", sentence, _STATE, said[0].detail, kind="unchecked")]


def of_no_code(said: list[Finding]) -> list[Finding]:
    """Why the code is not there to be called: its file raises before it defines it."""
    clear = not is_of_arguments(said) or _IMPOSSIBLE.match(said[0].sentence)
    return said if clear else [replace(f, kind="unchecked") for f in said]


def _is_own(finding: Finding, kind: str, source: str) -> bool:
    """Whether it misses an attribute of its own class, which no method of it sets, or
    of a package."""
    missing = "AttributeError: "
    said = finding.sentence
    own = re.match(
        f"{missing}'{re.escape(kind)}' object has no attribute '(\\w+)'", said
    )
    is_set = own is not None and re.search(rf"\bself\.{own[1]}\s*=[^=]", source)
    return bool(own and not is_set) or said.startswith(f"{missing}module ")


def _is_mistaken(finding: Finding, guessed: bool, source: str) -> bool:
    """Whether a call that the code makes itself is written wrongly, which no argument
    of ours can bring about."""
    said = finding.sentence
    unexpected = _UNEXPECTED.match(said)
    own = unexpected is not None and re.search(rf"\b{unexpected[1]}\s*=", source)
    wrong = not guessed and _MISCALLED.match(said)
    return bool(_IMPOSSIBLE.match(said) or own or wrong)


def _is_inside(finding: Finding) -> bool:
    """Whether a line of the code raised it, and not our call."""
    return not finding.detail.startswith(("called as", "constructed as"))


def _unknown(names: list[str] | dict[str, str]) -> str:
    quoted = [f"`{name}`" for name in sorted(names)]
    takes = "takes" if len(quoted) == 1 else "take"
    return f"What {' and '.join(quoted)} {takes} is not known"


def by_the_way(finding: Finding) -> Finding:
    """What code leaves behind in the process is a remark where nothing is judged."""
    of_state = finding.name == "changes_global_state"
    return replace(finding, kind="remark") if of_state else finding
