"""Texts that tokenizers stumble over: what a faster engine is tried on before it is trusted.

Prose in many scripts, code, numbers, contractions, every kind of white space, control characters,
emoji and their joiners, combining marks in and out of canonical order, letters that normalization
composes or takes apart, long repeats, added tokens whole and broken, and code points drawn at
random (assigned or not, never surrogates). Pure functions of their seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from trainpipes.order.permutation import random_key

__all__ = ["varied"]

_PROSE = """
The quick brown fox jumps over the lazy dog; it's what we'll've seen, isn't it? I'd say "they're" O'Brien's.
Voilà l'été où Noël était à l'œuvre: «ça coûte 12,50 €», n'est-ce pas? Größe, Straße, Äpfel – überall!
El niño comió piñas ¿verdad? ¡Qué sí! Ação, coração, não; Ünïcödé façade naïve co-operate.
Być może żółć gęślą jaźń. Příliš žluťoučký kůň úpěl ďábelské ódy. Đây là tiếng Việt có dấu nặng ệ.
İstanbul'da ığdır ŞİŞLİ çağrı. Ďakujem, őrült űrhajós, ĿL ǅ ǈ ŉ ﬁ ﬃ ſ K Å Ω.
Съешь же ещё этих мягких французских булок, да выпей чаю. Їжак і ґудзик, ћирилица њ.
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία· ΐ ΰ ᾳ ῶ Σίσυφος ς. Հայերեն լեզու և. ქართული ენა Ა.
שלום עולם, זה טֶקְסְט בְּעִבְרִית. مرحبا بالعالم، هٰذا نَصٌّ عَرَبِيّ ۱۲۳ ٤٥٦. اردو میں لکھا ہوا۔
नमस्ते दुनिया, यह हिन्दी क्षत्रिय श्री है। বাংলা ভাষা ক্ষ। தமிழ் மொழி கொ. తెలుగు భాష క్ష. ಕನ್ನಡ. മലയാളം ന്‍റെ. සිංහල ශ්‍රී.
ภาษาไทยไม่มีช่องว่างระหว่างคำ ๑๒๓ ลาว ພາສາລາວ. မြန်မာဘာသာ. ខ្មែរ ភាសា. བོད་སྐད་ཡིག། አማርኛ ቋንቋ።
中文没有空格,标点是全角的。「日本語」のテキスト、カタカナとひらがな、ﾊﾝｶｸ ｶﾞ 全角ＡＢＣ１２３。
한국어 문장입니다 각 각 힣 ᄒᆞᆫ글. ᠮᠣᠩᠭᠣᠯ ᠎ᠠ. ᏣᎳᎩ ꮳꮃꭹ. ⵜⴰⵎⴰⵣⵉⵖⵜ. 𐐀𐐨𐐇 𝔄𝖇𝒸 𝟘𝟙𝟚 𠀀𠮷 𒀀𓀀.
"""
PROSE = _PROSE.split()
_CODE = (
    "def f(x: int) -> str:\n    return x + 1\n¦"
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}\n¦"
    "if __name__ == '__main__':\r\n    main()\r\n¦SELECT * FROM t WHERE a<>'b' AND c>=1e-5;¦"
    '<div class="a-b_c">&nbsp;&#x27;</div>¦https://example.com/a/b?c=d&e=%20#f¦x==y!=z&&!w||~v¦'
    "camelCaseHTTPServer2Go¦snake_case__dunder__¦0x1F600 1_000_000 3.14e-10 .5 5. 1,234¦"
    "\\n\\t\\u00e9¦# ----- * * * -----\n¦$$\\frac{a}{b}$$¦a@b.co¦---\n...\n===¦"
    "// TODO(me)!!!\n\n\n¦{\"k\":[1,2.5,null,true]}¦```py\nx\n```¦()[]{}<>¦'s't're've'm'll'd¦"
    "'S 'LL 'Re 'ſ¦can’t ’s"
)
CODE = _CODE.split("¦")
_SPACE = (
    " ¦  ¦   ¦\t¦\n¦\r\n¦\r¦\n\n¦ \n¦\n ¦\t \t¦\x0b¦\x0c¦\x1c¦\x1d¦\x1e¦\x1f¦\x85¦\xa0¦\u1680¦"
    "\u180e¦\u2000¦\u2003¦\u2007¦\u2009¦\u200a¦\u200b¦\u2028¦\u2029¦\u202f¦\u205f¦\u2060¦\u3000¦"
    "\ufeff¦▁¦▁▁¦Ġ¦Ċ"
)
SPACE = _SPACE.split("¦")
_ODD = (
    "\x00¦\x01¦\x07¦\x08¦\x1b[31m¦\x7f¦\x80¦\x9f¦\xad¦\u034f¦\u061c¦\u200c¦\u200d¦\u200e¦\u202e¦"
    "\u2066¦￼¦�¦\ufffe¦\uffff¦\U0001fffe¦\U000e0001¦\U000e0041¦\ue000¦\U000f0000¦\U0010ffff¦🙂¦"
    "👩\u200d👩\u200d👧\u200d👦¦👍🏽¦🇩🇪¦🇩¦❤\ufe0f¦☺\ufe0e¦1\ufe0f\u20e3¦"
    "🏴\U000e0067\U000e0062\U000e007f¦½¦²¦Ⅷ¦٣¦৪¦〇¦㊿¦𝟗¦①¦೬¦ªº¦ʰ¦ˇ¦´¦¨¦§¦©¦™¦№¦℡¦㎏¦﷽¦…¦–¦—¦‘¦’¦“¦”¦"
    "«¦、¦。¦！¦〜¦€¦₿¦∑¦≠¦→¦█¦░¦︙¦٪¦।¦¿"
)
ODD = _ODD.split("¦")
#: Letters that are one or several code points, by the normalization form.
_COMPOSED = (
    "é¦e\u0301¦Å¦Å¦Ω¦K¦ệ¦e\u0323\u0302¦e\u0302\u0323¦각¦각¦가¦क़¦क\u093c¦\u0344¦\u0308\u0301¦豈¦יִ¦"
    "ǆ¦ŀ¦ﬁ¦ſ¦ẛ\u0323¦ẛ\u0323¦ஔ¦ஔ¦カ\u3099¦が¦𝅗𝅥¦丽¦İ¦i\u0307¦ß¦ẞ"
)
COMPOSED = _COMPOSED.split("¦")
_MARKS = (
    *range(0x300, 0x370), 0x5B0, 0x5BF, 0x64B, 0x652, 0x93C, 0x94D, 0xE38, 0xE48, 0x20DD, 0x3099,
    0xFE0E, 0xFE0F, 0x1D165, 0x1E8D0,
)  # fmt: skip
MARKS = list(map(chr, _MARKS))
LETTERS = "aZéßжΩא中あ한กक𝔄_1-'"

#: Ranges of code points and how often each is drawn from, of 16.
PLANES = [
    (0, 0x80, 2), (0x80, 0x800, 4), (0x800, 0x3000, 4), (0x3000, 0xD800, 2), (0xE000, 0x10000, 1),
    (0x10000, 0x20000, 2), (0x20000, 0x110000, 1),
]  # fmt: skip
DRAWN = [(low, high) for low, high, often in PLANES for _ in range(often)]


class _Draws:
    """Numbers, one after the other."""

    def __init__(self, seed: int, tokens: Sequence[str]) -> None:
        self.tokens = tokens
        self._bits = np.random.Philox(key=random_key(seed, "varied texts"))
        self._left: Iterator[int] = iter(())

    def below(self, n: int) -> int:
        """A number in ``range(n)``."""
        for number in self._left:
            return number % n
        self._left = iter(self._bits.random_raw(8192).tolist())
        return self.below(n)

    def of(self, choices: Sequence[str]) -> str:
        return choices[self.below(len(choices))]


def varied(count: int, seed: int = 0, tokens: Sequence[str] = ()) -> list[str]:
    """``count`` texts of up to some hundred characters.

    Args:
        count: how many.
        seed: other texts for another seed.
        tokens: texts of added tokens, which some of the texts hold.
    """
    draws = _Draws(seed, tokens)
    kinds = KINDS if tokens else KINDS[:-1]
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(1 + draws.below(3)):
            kind = kinds[draws.below(len(kinds))]
            parts.append(kind(draws))
        texts.append(draws.of(("", " ", "\n", draws.of(SPACE))).join(parts))
    return texts


def _prose(draws: _Draws) -> str:
    start, gap = draws.below(len(PROSE)), draws.of((" ", " ", " ", "  ", "\n", ""))
    words = PROSE[start : start + 1 + draws.below(12)]
    case = draws.below(8)
    text = gap.join(words)
    return text.upper() if case == 0 else text.title() if case == 1 else text


def _code(draws: _Draws) -> str:
    indent = " " * draws.below(13)
    return "".join(indent + draws.of(CODE) for _ in range(1 + draws.below(4)))


def _pieces(draws: _Draws) -> str:
    pools = (PROSE, CODE, SPACE, ODD, COMPOSED, MARKS)
    return "".join(draws.of(pools[draws.below(len(pools))]) for _ in range(1 + draws.below(12)))


def _points(draws: _Draws) -> str:
    """Code points from anywhere."""
    points = []
    for _ in range(1 + draws.below(16)):
        low, high = DRAWN[draws.below(len(DRAWN))]
        points.append(chr(low + draws.below(high - low)))
    return draws.of(("", "", " ")).join(points)


def _block(draws: _Draws) -> str:
    """Code points of one script."""
    low, high = DRAWN[draws.below(len(DRAWN))]
    first = low + draws.below(high - low) // 128 * 128
    return "".join(chr(first + draws.below(128)) for _ in range(1 + draws.below(24)))


def _spaces(draws: _Draws) -> str:
    parts = []
    for _ in range(1 + draws.below(8)):
        parts += [draws.of(SPACE) * (1 + draws.below(4)), draws.of((*LETTERS, "", "", "word", "."))]
    return "".join(parts)


def _repeats(draws: _Draws) -> str:
    pool = (PROSE, SPACE, ODD, COMPOSED, LETTERS)[draws.below(5)]
    return draws.of(pool) * (1 + draws.below(draws.below(80) + 1))


def _numbers(draws: _Draws) -> str:
    text = str(draws.below(10 ** (1 + draws.below(18))))
    return draws.of(("", "-", "+", "$", " ", "v")) + draws.of(
        (text, f"{int(text):,}", text + "." + text)
    )


def _short_forms(draws: _Draws) -> str:
    word = draws.of(("it", "I", "WE", "é", "don", "Σ", "中", "1", " ", "_", ""))
    end = draws.of(
        ("s", "t", "re", "ve", "m", "ll", "d", "S", "T", "RE", "Ve", "lL", "ſ", "ve's", "x", "")
    )
    return word + draws.of(("'", "'", "’", "ʼ", "''", " '", "' ")) + end


def _marked(draws: _Draws) -> str:
    letters = [
        draws.of(LETTERS) + "".join(draws.of(MARKS) for _ in range(draws.below(6)))
        for _ in range(5)
    ]
    if draws.below(16) == 0:
        letters.append("".join(draws.of(MARKS) for _ in range(40)))
    return "".join(letters)


def _tokens(draws: _Draws) -> str:
    token = draws.of(draws.tokens)
    cut = draws.below(len(token) + 1)
    broken = (
        token,
        token,
        token[:cut],
        token[cut:],
        token.upper(),
        token + token,
        token[:cut] + " " + token[cut:],
    )
    return (
        draws.of(("", " ", "a", "\n", "é", "  "))
        + draws.of(broken)
        + draws.of(("", " ", "a", "\n", ".", "  "))
    )


KINDS = (
    _prose, _prose, _code, _pieces, _points, _block, _spaces, _repeats, _numbers, _short_forms, _marked,
    _tokens,
)  # fmt: skip
