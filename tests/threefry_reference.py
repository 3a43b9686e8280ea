"""A reference of the draws of positions in Python integers: Threefry-2x32 with 20 rounds, and the key chain."""

_WORD = 0xFFFFFFFF
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_DOMAIN = 0x6175676D


def threefry(key, counter):
    """Return two words by the block cipher of Salmon et al. (2011), from two words of key and two of counter."""
    schedule = (*key, 0x1BD11BDA ^ key[0] ^ key[1])
    left, right = (counter[0] + key[0]) & _WORD, (counter[1] + key[1]) & _WORD
    for turn in range(20):
        left = (left + right) & _WORD
        by = _ROTATIONS[turn % 8]
        right = ((right << by | right >> (32 - by)) & _WORD) ^ left
        if turn % 4 == 3:
            group = turn // 4 + 1
            left = (left + schedule[group % 3]) & _WORD
            right = (right + schedule[(group + 1) % 3] + group) & _WORD
    return left, right


def words_at(seed, position, purpose, block):
    """Return the two words of (seed, position, purpose, block)."""
    key = threefry((seed >> 32, seed & _WORD), (0, _DOMAIN))
    key = threefry(key, (0, position >> 32))
    key = threefry(key, (0, position & _WORD))
    return threefry(key, (0, 256 * purpose + block))


def unit(word):
    return (word >> 8) / 2**24


def index(word, count):
    return word * count >> 32
