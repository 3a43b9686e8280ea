"""A command with planted faults, for the tests of scripts/torture: `planted_command FAULT`."""

import atexit
import os
import signal
import sys
import time


def raise_key_error():
    raise KeyError("momentum")


def allocate_300_mib():
    print(len(bytearray(b"x" * (300 << 20))))


def allocate_too_much():
    bytearray(16 << 30)


def abort_at_exit():
    atexit.register(os.abort)


def print_escape_byte():
    sys.stdout.buffer.write(b"class \x9b2J\n")


def fail_with_message(message, code):
    """Return a function that prints an error message and returns an exit code."""

    def fail():
        print(message.format(sys.argv[0]), file=sys.stderr)
        return code

    return fail


FAULTS = {
    "nothing": lambda: 0,
    "hang": lambda: time.sleep(600),
    "crash": lambda: os.kill(os.getpid(), signal.SIGBUS),
    "traceback": raise_key_error,
    "memory": allocate_300_mib,
    "too-much-memory": allocate_too_much,
    "escape": lambda: print("class \x1b[31mred"),
    "escape-byte": print_escape_byte,
    "refuse": fail_with_message("{}: train/manifest.json: not valid JSON; restore the file", 2),
    "vague": fail_with_message("train/manifest.json is read\n{}: something is wrong", 2),
    "silent": lambda: 2,
    "at-exit": abort_at_exit,
    "strange-code": fail_with_message("{}: train/manifest.json is damaged", 7),
}


def main():
    """Do the fault that the command line names."""
    return FAULTS[sys.argv[1]]()
