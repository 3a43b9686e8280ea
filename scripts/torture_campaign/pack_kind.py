"""The kind ``packs``: damage of packs at rest, under a reader and under a training."""

from __future__ import annotations

import random
import shutil
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from scripts.torture_campaign.case import Case, Trial
from scripts.torture_campaign.live_faults import LIVE_FAULTS, attempt_on_reader, attempt_on_training
from scripts.torture_campaign.pack_faults import PACK_FAULTS, draw_pack_fault, replaced_file
from scripts.torture_campaign.pack_judging import judge_reader, judge_training, judge_verify
from scripts.torture_campaign.sound_packs import LAYOUTS, SoundPack, Training, make_sound_packs, train_on_sound_pack

_SHORT = {"steps": 3, "batch": 8}
_LONG = {"steps": 300, "batch": 32}
_LIVE_LAYOUTS = ("raw", "large")
_TRAINED_SHARE = 0.15
_LIVE_SHARE = 0.05
_FAULTS_OF_OTHER_LAYOUTS = ("swap-within-split", "swap-between-splits", "swap-splits", "swap-labels", "labels-permuted")


@dataclass
class PackKind:
    """Faults of packs.

    Attributes:
        cache: folder of compiled programs.
        bases: the sound packs, by layout.
        trainings: results of trainings on them: short ones, and long ones for faults during the training.
    """

    cache: Path
    bases: dict[str, SoundPack] = field(default_factory=dict)
    trainings: dict[tuple[str, int], Training] = field(default_factory=dict)
    name: str = "packs"
    _sound: Path = Path()
    _locks: dict[tuple[str, int], threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))

    def prepare(self, trial: Trial) -> None:
        """Create the sound packs."""
        self.bases = make_sound_packs(trial, tuple(LAYOUTS))
        self._sound = trial.folder

    def training(self, trial: Trial, layout: str, lengths: dict[str, int]) -> Training:
        """Return the result of a training on a sound pack; the first call runs it."""
        key = layout, lengths["steps"]
        with self._locks[key]:
            if key not in self.trainings:
                folder = self._sound / "-".join(map(str, key))
                folder.mkdir(exist_ok=True)
                maker = Trial(trial.case, folder, trial.commands)
                self.trainings[key] = train_on_sound_pack(maker, self.bases[layout], self.cache, **lengths)
        return self.trainings[key]

    def cases(self, seed: int, count: int) -> list[Case]:
        """Return the named cases, then drawn ones up to ``count`` in all."""
        names = [f"raw:{fault}" for fault in PACK_FAULTS]
        names += [f"{layout}:{fault}" for layout in ("dense", "blosc", "large") for fault in _FAULTS_OF_OTHER_LAYOUTS]
        names += [f"live-{what}:{layout}:{fault}" for layout in _LIVE_LAYOUTS for what in ("training", "reader")
                  for fault in LIVE_FAULTS]  # fmt: skip
        for key in self._files_to_replace():
            names += [f"raw:{how}:{key}" for how in ("pipe", "dangling", "removed", "zero-device", "folder")]
        names += [f"random-{number}" for number in range(max(0, count - len(names)))]
        return [Case(self.name, name, seed) for name in names]

    def _files_to_replace(self) -> list[str]:
        """Return one file of each kind of a sound pack: train's without further shards, and two files of val."""
        others = ("pixels/c/1/", "pixels/c/2/")
        train = [
            key for key in self.bases["raw"].tree if key.startswith("train/") and not any(o in key for o in others)
        ]
        return [*train, "val/manifest.json", "val/failures.jsonl"]

    def attempt(self, trial: Trial) -> None:
        """Damage a copy of a sound pack, run the commands on it and judge them."""
        draw, name = trial.case.draw(), trial.case.name
        layout, is_trained = self._layout(name, draw), False
        base = self.bases[layout]
        pack = trial.folder / "pack"
        shutil.copytree(base.folder, pack)
        if name.startswith("live-"):
            self._attempt_live(trial, base, pack, name.split(":")[0].removeprefix("live-"), name.split(":")[2], draw)
            return
        if trial.case.number is not None:
            if layout in _LIVE_LAYOUTS and draw.random() < _LIVE_SHARE:
                what, fault = draw.choice(["reader", "training"]), draw.choice(list(LIVE_FAULTS))
                self._attempt_live(trial, base, pack, what, fault, draw)
                return
            trial.fault = f"{layout}: {draw_pack_fault(pack, base, draw)}"
            is_trained = draw.random() < _TRAINED_SHARE
        else:
            _, fault, *key = name.split(":")
            chosen = replaced_file(key[0], fault) if key else PACK_FAULTS[fault]
            trial.fault = f"{layout}: {chosen(pack, base, draw)}"
            is_trained = fault in ("pipe", "removed") or not key
        judge_reader(trial, base, pack)
        judge_verify(trial, base, pack)
        if is_trained and not trial.has_hung:
            judge_training(trial, base, pack, self.training(trial, layout, _SHORT), self.cache)

    def _layout(self, name: str, draw: random.Random) -> str:
        if name.startswith("random-"):
            return draw.choice(list(LAYOUTS))
        return name.split(":")[1 if name.startswith("live-") else 0]

    def _attempt_live(
        self, trial: Trial, base: SoundPack, pack: Path, what: str, fault: str, draw: random.Random
    ) -> None:
        if what == "reader":
            attempt_on_reader(trial, base, pack, LIVE_FAULTS[fault], draw)
            return
        sound = self.training(trial, base.name, _LONG)
        attempt_on_training(trial, base, pack, LIVE_FAULTS[fault], draw, sound, self.cache)
