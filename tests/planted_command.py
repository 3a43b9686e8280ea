"""A command with planted faults, for the tests of scripts/torture: `planted_command FAULT`."""

import os
import signal
import sys
import time


def fail_by_key():
    raise KeyError("momentum")


def hold_memory():
    print(len(bytearray(b"x" * (300 << 20))))


def want_memory():
    bytearray(16 << 30)


def say_escape_byte():
    sys.stdout.buffer.write(b"class \x9b2J\n")


def complain(words, code):
    """Return what ends with an error in these words."""

    def end():
        print(words.format(sys.argv[0]), file=sys.stderr)
        return code

    return end


FAULTS = {
    "nothing": lambda: 0,
    "hang": lambda: time.sleep(600),
    "crash": lambda: os.kill(os.getpid(), signal.SIGBUS),
    "traceback": fail_by_key,
    "memory": hold_memory,
    "greed": want_memory,
    "escape": lambda: print("class \x1b[31mred"),
    "escape-byte": say_escape_byte,
    "refuse": complain("{}: train/manifest.json: not valid JSON; restore the file", 2),
    "mumble": complain("train/manifest.json is read\n{}: something is wrong", 2),
    "silent": lambda: 2,
    "strange-code": complain("{}: train/manifest.json is damaged", 7),
}


def main():
    """Commits the fault that the command line names."""
    return FAULTS[sys.argv[1]]()
