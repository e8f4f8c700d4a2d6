#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/data/tokenizer-text.txt: lines of bytes that tokenizers get wrong.  Same bytes on every run."""

import pathlib
import random
import sys

SENTENCES = """
The mill turns because the leat brings it water; it doesn't care how big the reservoir is.
I'd say we've got they'll, you're, I'm, it's and she'd've in ONE line: I'D WE'VE THEY'LL YOU'RE I'M IT'S.
Der Müller öffnet das Wehr, füllt den Graben und grüßt die Gänse: „Schönes Wetter heute!“
Straße, Größe, Äpfel, Übermut, ß und ẞ; 3,5 kg für 12,99 € am 24.12.2025.
L'eau du canal coule jusqu'au moulin ; où est passé le garçon ? Ça, c'est l'été à Noël.
El niño comió piñas y cigüeñas en la montaña: ¿cuántas? ¡Muchísimas!
A água corre à noite; não há ninguém no caminho, só o cão do João.
L'acqua è più fredda di ieri, perché è già novembre; così va la città.
Het water stroomt door de geul; 's avonds zie je 'm niet meer, hè?
Vatten rinner över ängen på Åland; träd, ål, ö och å.
Rødgrød med fløde, sagde kvinden på øen; hvor er æblerne?
Vesi virtaa myllylle, ja äiti syö öylättiä yöllä.
Zażółć gęślą jaźń, a potem wypij wodę ze źródła w Łodzi.
Příliš žluťoučký kůň úpěl ďábelské ódy u mlýna.
Árvíztűrő tükörfúrógép a malom előtt, őszi esőben.
Apă, țară, știință, înțelegere și câteva căni de lapte.
Su değirmene akıyor; İstanbul'da ığdır ile İzmir'in çınarları gölge verir.
Вода течёт по жёлобу к мельнице, а мельник ещё спит. Который час?
Вода тече до млина; її їжак з'їв ґудзик.
Водата тече към воденицата, а щъркелът чака.
Вода тече ка воденици; Ђура, Љуба и Њежа слушају.
Το νερό τρέχει προς τον μύλο· τι ώρα είναι; Ἀρχαία: ὕδωρ, ᾧ.
המים זורמים אל הטחנה; שָׁלוֹם עֲלֵיכֶם, מה שלומך?
الماء يجري إلى الطاحونة، والسَّلامُ عليكم؛ كيف حالك؟ ١٢٣٤٥
آب به سوی آسیاب می‌رود؛ حال شما چطور است؟ ۱۲۳۴
پانی چکی کی طرف بہتا ہے، آپ کیسے ہیں؟
पानी चक्की की ओर बहता है। आप कैसे हैं? १२३
জল কলের দিকে বয়ে যায়। কেমন আছেন? ১২৩
நீர் ஆலையை நோக்கி ஓடுகிறது. எப்படி இருக்கிறீர்கள்?
నీరు మర వైపు ప్రవహిస్తుంది. ఎలా ఉన్నారు?
ನೀರು ಗಿರಣಿಗೆ ಹರಿಯುತ್ತದೆ. ಹೇಗಿದ್ದೀರಿ?
വെള്ളം മില്ലിലേക്ക് ഒഴുകുന്നു. സുഖമാണോ?
ජලය මෝල දෙසට ගලයි. කොහොමද?
น้ำไหลไปที่โรงสี สบายดีไหม ๑๒๓ กำลังทำน้ำ
ນ້ຳໄຫຼໄປໂຮງສີ ສະບາຍດີບໍ
ရေသည် စက်ဆီသို့ စီးဆင်းသည်။ နေကောင်းလား။
ទឹកហូរទៅម៉ាស៊ីន។ សុខសប្បាយទេ?
Nước chảy về cối xay; bạn có khỏe không? Tiếng Việt có nhiều dấu: ằ ẳ ẵ ặ ữ ợ.
Maji yanatiririka hadi kinu; habari gani, ng'ombe wangu?
水は水車へ流れる。お元気ですか？カタカナ、ひらがな、漢字、ｶﾞ半角。
水流向磨坊，你好吗？我们今天讨论“缓存”与量化：１２３、456。
水流向磨坊，你好嗎？繁體字：龍龜鬱，㐀㐁𠀀𠀁𪚥。
물은 방앗간으로 흐른다. 안녕하세요? ㅋㅋㅋ ㅠㅠ 한글 자모: 각
წყალი წისქვილისკენ მიედინება. როგორ ხარ?
Ջուրը հոսում է դեպի ջրաղաց։ Ինչպե՞ս ես։
ውሃ ወደ ወፍጮ ይፈሳል። እንዴት ነህ?
ᎣᏏᏲ ᏙᎯᏧ; ᐃᓄᒃᑎᑐᑦ; ⵜⴰⵎⴰⵣⵉⵖⵜ; ᠮᠣᠩᠭᠣᠯ; བོད་ཡིག; ꆈꌠ
Ëlatine: Quīnque mōlae; ǣ þ ð ƿ; ᚠᚢᚦᚨᚱᚲ; 𐌰𐌱𐌲; 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛
👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ☕️ ❤️‍🔥 1️⃣ ©️ 🫠🫡🪿
∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β = ¬(¬α ∨ β), ∑ᵢ aᵢ² ≤ ∞, ½ ⅓ Ⅻ ④ ² ³ ₂
naïve café: e\u0301 vs é, A\u030a vs Å vs \u212b, ﬁ vs fi, \u1e9b\u0323
"""

CODE = r"""
#include <stdio.h>
int main(int argc, char **argv) { return argc > 1 ? puts(argv[1]) : -1; }
	for (size_t i = 0; i < n; i++)		/* tabs */
        if (!(flags & (1U << 31)) && p->next != NULL) *q++ = ~0x7f;
def f(x: int = 3, *args, **kw) -> dict[str, list[int]]:
    return {k: [i**2 for i in range(10) if i % 3 == 0] for k in kw.keys()}
        raise ValueError(f"bad {x!r:>10}: {1e-9:.3e}")  # comment
SELECT name, COUNT(*) FROM mills WHERE flow >= 12.5 AND id <> 'x''y' GROUP BY 1;
<div class="a b" id='c'>&nbsp;&lt;tag/&gt; <br/></div><!-- no -->
{"a": [1, 2.5e10, -3], "b\n": {"c": null, "d": true, "\u00e9": "\\"}}
curl -sSL https://example.org/a/b?x=1&y=%20#frag | sed -e 's/[^a-z]*//g' | sort -u > out.txt
export PATH="$HOME/bin:${PATH}"; [[ -f ~/.rc ]] && source ~/.rc || exit 1
fn main() -> Result<(), Box<dyn Error>> { let v: Vec<_> = (0..10).map(|x| x * x).collect(); Ok(()) }
const f = async (a, ...b) => { await g`t${a}`; return b?.[0] ?? {}; };
\documentclass{article} \begin{equation} \frac{a}{b} = \sqrt[3]{x_{i}^{2}} \end{equation}
git commit -m "a: b" && git push -u origin HEAD:refs/heads/x-y_z --force-with-lease
| a | b |---|:-:| **bold** _it_ `code` [link](http://x.y) ![img](a.png) - [ ] todo
================================================================================
////////////////////////////////////////////////////////////////////////////////
--------------------#####################********************~~~~~~~~~~~~~~~~
0xDEADBEEF 0b1010 1_000_000 3.14159 -1e-5 .5 5. 1,234,567.89 192.168.0.1 2001:db8::1
2025-11-29T15:41:44Z +49 (0)30 1234-5678 v1.2.3-rc.4 #123 50% $9.99 1st 2nd 3rd 10th
a1b2c3 x86_64 utf8 UTF-8 H2O CO₂ 3D 4K 5G i18n k8s 1234567890123456789012345678901234567890
	 x6 + test
						six tabs
@@ -1,7 +1,9 @@ class X: pass
$$$ !!! ??? ... ,,, ;;; ''' \"\"\" ((( ))) [[[ ]]] {{{ }}} <<< >>> |||
"""

SPECIAL = """
<|im_start|>system\\nYou are<|im_end|>
<|im_end|><|im_start|>system
<|im_start|> user
 <|im_start|>user <|im_end|> x
<|im_start|<|im_end|>
<|im_start|><|im_start|>
<|IM_START|> <|im-start|> <| im_start |> <|im_start>
<|endoftext|>a<|endoftext|> b <|endoftext|>  c
<repo_name>leat<file_sep>main.c<filename>x<gh_stars>3
<reponame>x<issue_start>y<issue_comment>z<issue_closed>
<jupyter_start><jupyter_text>1<jupyter_code>2<jupyter_output>3<jupyter_script><empty_output>
<s>[INST] hi [/INST]</s> <|eot_id|><|begin_of_text|><end_of_turn>
<|im_end|>1 <|im_end|>12 <|im_end|>'s <|im_end|>\t
<｜end▁of▁sentence｜> <|im_end|\u200b> <|im\u00adend|>
<<|im_end|>> <|<|im_end|>|> ||im_end|>
"""

BLANKS = [" ", "  ", "   ", "\t", "\t\t", "\r", "\u00a0", "\u2003", "\u3000", "\u1680", "\u180e", "\u2028", "\u0085", "\u200b",
          "\ufeff", "\v", "\f", "\x1c", "\x1f", "\u205f", "\u202f", " \t ", "        ", "\0", "\x7f", "\x1b[0m"]

INVALID = [b"\xff", b"\xfe\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xed\xb0\x80", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xe2\x82", b"\x80", b"\xbf\xbf",
           b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xc1\xbf", b"\xe0\x80\x80", b"\xf8\x88\x80\x80\x80", b"\xc3", b"\xc3\xc3\xa9",
           b"\xf1\x80\x80", b"\xe9"]

# Blocks from which random characters are drawn; all assigned long ago, so that Unicode versions agree.
RANGES = [(0x20, 0x7e), (0xa1, 0xff), (0x100, 0x17f), (0x250, 0x2ad), (0x300, 0x36f), (0x391, 0x3a1), (0x3b1, 0x3c9), (0x410, 0x44f),
          (0x5d0, 0x5ea), (0x621, 0x63a), (0x660, 0x669), (0x904, 0x939), (0x93e, 0x94c), (0x966, 0x96f), (0xe01, 0xe3a), (0x10d0, 0x10f0),
          (0x1100, 0x1112), (0x1e00, 0x1e95), (0x2010, 0x2027), (0x2070, 0x2071), (0x2074, 0x208e), (0x2150, 0x2188), (0x2190, 0x21ff),
          (0x2200, 0x22ff), (0x2460, 0x249b), (0x2500, 0x257f), (0x3041, 0x3096), (0x30a1, 0x30fa), (0x3220, 0x3243), (0x4e00, 0x9fa5),
          (0xac00, 0xd7a3), (0xff10, 0xff19), (0xff21, 0xff3a), (0x10300, 0x1031e), (0x1d400, 0x1d454), (0x1d7ce, 0x1d7ff), (0x1f600, 0x1f64f),
          (0x20000, 0x2a6d6), (0x40000, 0x40010), (0xe0020, 0xe007f), (0x10fff0, 0x10fffd)]


def random_text(rng, n):
    low, high = rng.choice(RANGES)
    out = []
    for _ in range(n):
        if rng.random() < 0.15:
            low, high = rng.choice(RANGES)
        out.append(" " if rng.random() < 0.12 else chr(rng.randint(low, high)))
    return "".join(out)


def words_of(lines):
    return [w for line in lines for w in line.split(" ") if w]


def main(path):
    rng = random.Random(20251129)
    sentences = SENTENCES.strip("\n").split("\n")
    code = CODE.strip("\n").split("\n")
    special = [s.replace("\\n", "\r").replace("\\t", "\t") for s in SPECIAL.strip("\n").split("\n")]
    words = words_of(sentences + code)
    markers = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<file_sep>", "<|im_", "|>", "<|"]
    lines = [b""] + [s.encode() for s in sentences + code + special]
    for blank in BLANKS:
        for form in ("{}", "a{}b", "{}a", "a{}", "{0}{0}", "a {}b", "a{} b", "1{}2", "{0} {0}x", "!{}?"):
            lines.append(form.format(blank).encode())
    for n in list(range(1, 40)) + [64, 65, 127, 128, 200]:
        lines += [b" " * n, b" " * n + b"X", b"\t" * n + b"x", b"a" * n, b"7" * n, b"ab " * (n // 3) + b"-" * n, "é".encode() * n]
    for s in sentences + code + special:
        lines += [(" " + s).encode(), s.upper().encode(), s.replace(" ", rng.choice(["  ", "\t", "\u00a0", "\u3000"])).encode()]
        cut = s.encode()
        begin = rng.randrange(len(cut) // 2 + 1)
        lines.append(cut[begin:begin + rng.randrange(1, len(cut))])  # often cuts characters: invalid UTF-8
    for _ in range(420):
        lines.append(" ".join(rng.choice(words) for _ in range(rng.randint(1, 12))).encode())
    for _ in range(420):
        lines.append(random_text(rng, rng.randint(1, 60)).encode())
    for _ in range(200):
        parts = [rng.choice(words + markers * 20 + BLANKS * 3 + [str(rng.randrange(10**rng.randint(1, 9)))] * 40) for _ in range(rng.randint(1, 14))]
        lines.append("".join(parts).encode())
    for _ in range(160):
        parts = [rng.choice([rng.choice(words).encode(), rng.choice(INVALID), rng.choice(INVALID), rng.choice(markers).encode(), b" "])
                 for _ in range(rng.randint(1, 10))]
        lines.append(b"".join(parts))
    for bad in INVALID:
        lines += [bad, b"a" + bad, bad + b"a", b"a " + bad + b" b", bad * 3]
    for _ in range(60):
        lines.append(bytes(rng.randrange(256) for _ in range(rng.randint(1, 50))).replace(b"\n", b"\r"))
    assert not any(b"\n" in line for line in lines)
    pathlib.Path(path).write_bytes(b"\n".join(lines) + b"\n")
    print(len(lines), "lines")


main(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent / "data" / "tokenizer-text.txt")
