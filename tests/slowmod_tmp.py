import time

from tests.toy import toy_batch


def slow(step):
    time.sleep(0.2)
    return toy_batch(step)
