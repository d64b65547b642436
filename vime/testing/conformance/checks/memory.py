"""How a trainer leaves its device."""

from __future__ import annotations

import importlib.util
from typing import Any

from vime.errors import MemoryStateError
from vime.facts.memory import MemoryBackend, NullMemory, Tag, TagSemantics
from vime.facts.process import RoleKind
from vime.memory.protocol import TrainerMemory
from vime.testing.conformance.registry import NotRun, check, fail, require
from vime.testing.conformance.source import bad_options, members_of, problem
from vime.testing.conformance.subject import Case, Subject

NEEDED = (Tag.PARAMS, Tag.GRADS, Tag.OPTIMIZER)
_POLICIES = ("keep", "suspend", "destroy")
_HOST = "cpu"
_ELEMENTS = 4096


@check("C26", hooks=["vime_memory_backend"], title="trainer memory is described")
def memory_is_described(subject: Subject) -> None:
    """A backend describes parameters, gradients and optimizer, says why a tag stays, names a class with every method of
    TrainerMemory, and what becomes of communicators. NullMemory says why nothing leaves."""
    methods, _ = members_of(TrainerMemory)
    for asked in subject.requests(RoleKind.TRAINER):
        backend: MemoryBackend | NullMemory = subject.ask("vime_memory_backend", asked.request)
        at = f"for {asked.about}"
        if isinstance(backend, NullMemory):
            require(backend.reason.strip(), f"NullMemory has no reason {at}", "say why nothing can leave the device")
            continue
        absent = [tag for tag in NEEDED if tag not in backend.tags]
        require(not absent, f"the backend says nothing about {', '.join(absent)} {at}", "give each tag its semantics")
        for tag, semantics in backend.tags.items():
            _check_tag(tag, semantics, at)
        wrong = problem(backend.factory, methods=methods) or bad_options(backend.factory)
        require(not wrong, f"{wrong} ({at})", "implement vime.memory.protocol.TrainerMemory")
        policy = backend.communicators in _POLICIES
        require(policy, f"communicators is {backend.communicators!r} {at}", f"write one of {', '.join(_POLICIES)}")
        require(all(text.strip() for text in backend.exclusions), f"an exclusion is empty {at}", "say what must not be used")


def _check_tag(tag: Tag, semantics: TagSemantics, at: str) -> None:
    require(semantics.frees or semantics.why.strip(), f"{tag} stays {at}, and nothing says why", "give TagSemantics a why")
    lost = not semantics.frees and not semantics.preserves
    require(not lost, f"{tag} is lost without being freed {at}", "content that stays on the device is preserved")


@check("C27", hooks=["vime_memory_backend"], title="trainer memory keeps its word")
def memory_keeps_its_word(subject: Subject) -> None:
    """Pause frees what it says and resume brings the content back, through every view; discard brings zeros; tags move
    alone; a wrong transition raises MemoryStateError and changes nothing. On host tensors, or on the device with --device."""
    if importlib.util.find_spec("torch") is None:
        raise NotRun("torch is not installed")
    case = subject.real[0]
    backend = subject.ask("vime_memory_backend", subject.request(case, RoleKind.TRAINER, residency="park"))
    if isinstance(backend, NullMemory):
        raise NotRun(f"nothing leaves the device: {backend.reason}")
    device = device_of(subject, case)
    try:
        memory = backend.factory.build()
    except ImportError as error:
        raise NotRun(f"{backend.factory.target} cannot be built here: {error}") from error
    _Model(memory, backend, device).check()


def device_of(subject: Subject, case: Case) -> str:
    """Torch's device on which this can run. Raises NotRun where it is not here."""
    kind = subject.ask("vime_capabilities", case.inventory).device_type
    if kind != _HOST and not subject.device:
        raise NotRun(f"it needs a {kind} device; run with --device on one")
    return kind


class _Model:
    """A backend's promises, tried on three tags; two tensors of a tag share one storage."""

    def __init__(self, memory: Any, backend: MemoryBackend, device: str) -> None:
        import torch

        self._torch, self._memory, self._backend = torch, memory, backend
        self._whole: dict[Tag, Any] = {}
        self._views: dict[Tag, Any] = {}
        for number, tag in enumerate(NEEDED):
            whole = torch.arange(_ELEMENTS, dtype=torch.float32, device=device) + number * _ELEMENTS
            self._whole[tag], self._views[tag] = whole, whole[_ELEMENTS // 2 :]
            memory.region(tag, lambda tag=tag: [self._whole[tag], self._views[tag]])

    def check(self) -> None:
        for tag in NEEDED:
            self._round(tag)
        self._together()
        self._refusals()
        self._discard()

    def _expected(self, tag: Tag) -> Any:
        start = NEEDED.index(tag) * _ELEMENTS
        return self._torch.arange(_ELEMENTS, dtype=self._torch.float32) + start

    def _require_content(self, tag: Tag, when: str) -> None:
        size = self._whole[tag].untyped_storage().nbytes()  # reading what is freed would end the process
        require(size == 4 * _ELEMENTS, f"{tag} has a storage of {size} bytes {when}", "leave it, or bring it back whole")
        got, wanted = self._whole[tag].cpu(), self._expected(tag)
        require(self._torch.equal(got, wanted), f"{tag} has other content {when}", "bring back what was there")
        same = self._torch.equal(self._views[tag].cpu(), wanted[_ELEMENTS // 2 :])
        require(same, f"a view of {tag} has other content {when}", "keep tensors that share a storage together")

    def _size(self, tag: Tag) -> int:
        return int(self._memory.device_bytes()[tag])

    def _round(self, tag: Tag) -> None:
        semantics = self._backend.tags[tag]
        before = self._size(tag)
        require(before == 4 * _ELEMENTS, f"{tag} counts {before} bytes, it has {4 * _ELEMENTS}", "count storages, each once")
        self._memory.pause([tag])
        if semantics.frees:
            left = self._size(tag)
            require(left == 0, f"{tag} holds {left} bytes while it is paused, it says that it frees", "free its storage")
            gone = self._whole[tag].untyped_storage().nbytes()
            require(gone == 0, f"{tag} still has a storage of {gone} bytes while it is paused", "free its storage")
        if semantics.frees and semantics.preserves:
            kept = int(self._memory.host_bytes()[tag])
            require(kept > 0, f"{tag} keeps 0 bytes on the host while it is paused", "count what is kept aside")
        for other in NEEDED:
            if other is not tag:
                self._require_content(other, f"while {tag} is paused")
        self._memory.resume([tag])
        require(self._size(tag) == before, f"{tag} has another size after resume", "bring its whole storage back")
        if semantics.preserves:
            self._require_content(tag, "after pause and resume")
        elif self._whole[tag].untyped_storage().nbytes():
            self._whole[tag].copy_(self._expected(tag))

    def _together(self) -> None:
        self._memory.pause(NEEDED)
        self._memory.resume(NEEDED)
        for tag in NEEDED:
            if self._backend.tags[tag].preserves:
                self._require_content(tag, "after all tags were paused and resumed together")

    def _refusals(self) -> None:
        first, second = NEEDED[0], NEEDED[1]
        self._refused("resume", [first], "what is on the device")
        self._refused("pause", [Tag.ENGINE_WEIGHTS], "a tag that was never registered")
        self._memory.pause([first])
        self._refused("pause", [first], "what is paused")
        self._refused("pause", [second, first], "one tag that may and one that may not")
        self._require_content(second, "after a refused pause")
        whole = self._size(second) == 4 * _ELEMENTS
        require(whole, f"a refused pause has freed {second}", "check every tag before the first is moved")
        self._refused("discard", [first], "what is paused")
        self._memory.resume([first])

    def _refused(self, action: str, tags: list[Tag], what: str) -> None:
        try:
            getattr(self._memory, action)(tags)
        except MemoryStateError:
            return
        except Exception as error:  # noqa: BLE001  anything else is the failure to report
            fail(f"{action} of {what} raises {type(error).__name__}: {error}", "raise MemoryStateError")
        fail(f"{action} of {what} is not refused", "raise MemoryStateError and change nothing")

    def _discard(self) -> None:
        tag = Tag.GRADS
        self._memory.discard([tag])
        if self._backend.tags[tag].frees:
            require(self._size(tag) == 0, f"{tag} holds memory after discard", "free its storage")
        kept = int(self._memory.host_bytes()[tag])
        require(kept == 0, f"{tag} keeps {kept} bytes on the host after discard", "keep nothing")
        self._memory.resume([tag])
        require(self._size(tag) == 4 * _ELEMENTS, f"{tag} does not come back after discard", "give it its storage back")
        zeros = not bool(self._whole[tag].cpu().any())
        require(zeros, f"{tag} does not come back as zeros after discard", "fill it with zeros")
