r"""Paths of somebody's machine in a text, and not the slashes of maths, addresses, tags and names.

text -> where each path begins, and the path

Files are not looked at: a path of any machine counts, whether it exists here or not.
"""

import re
from collections.abc import Iterator

ROOTS = (
    r"(?:home|[Uu]sers?|root|tmp|var|private|mnt|media|data|dataset|scratch|work|workspace|workspaces|opt|srv|usr|etc|"
    r"content|kaggle|gpfs|lustre|fsx|nfs|efs|s3|beegfs|ceph|storage|projects?|raid|cluster|shared?|disks?|volumes?|"
    r"Volumes|afs|net|export|import|local|nas|hpc|mount|ssd|nvme|bucket|vol|run|dev|proc|sys|boot|teamspace|"
    r"dbfs|autodl-tmp|cfs|cpfs|inspire|mlx|apdcephfs|p?ssd|host|app|code|runpod-volume)s?[\d_-]*\d*"
)
"""Names of folders at the root with which a path of somebody's machine begins, as a pattern."""
_PART = r"[\w.~@+=-]+"
_FORMS = tuple(
    re.compile(form)
    for form in (
        rf"(?<![\w./~<)\]}}\\-])/(?:{ROOTS})/{_PART}[\w./~@+=-]*",
        # Whatever its root is called: three parts at least, since `/a/b/` is a regular expression or a ratio too.
        rf"(?<![\w./~<)\]}}\\$^-])/(?!(?:v\d|api|resolve|tree|blob|docs|wiki|think|no_think)/)"
        rf"[A-Za-z_]{_PART}(?:/[A-Za-z_.][\w.~@+=-]*){{2,}}",
        rf"(?<![\w~/.\\])~[a-z_]?[\w-]*/{_PART}[\w./~@+=-]*",
        r"file://[^\s\"')]+",
        rf"(?<!\w)[A-Z]:/(?!/){_PART}/[\w./~-]+",
    )
)
_DRIVE = re.compile(r"(?<!\w)[A-Za-z]:\\{1,2}(?P<first>[^\s\\/:*?\"'<>|{}$^_&=(),;]+)(?P<next>.?)")
_SHARE = re.compile(
    r"(?<![\w\\&=+)}$^.,-])\\{2,4}(?P<first>[A-Za-z][\w.-]{2,})\\{1,2}(?P<second>[A-Za-z][\w$.-]+)(?P<next>.?)"
)
# After a colon or a line break of LaTeX a command begins as the part of a path does.
_LATEX = re.compile(
    "(?:"
    "alpha|approx|bar|bf|begin|beta|big|bigl|bigr|binom|bmod|boldsymbol|boxed|cal|cap|cdot|cdots|chi|colon|cong|"
    "cos|cot|csc|cup|dbinom|ddots|deg|delta|det|dfrac|displaystyle|div|dots|ell|emptyset|end|epsilon|equiv|eta|"
    "exists|exp|forall|frac|gamma|gcd|ge|geq|hat|hline|hspace|hbox|iff|implies|in|inf|infty|int|it|kappa|lambda|"
    "langle|large|ldots|le|left|leq|lfloor|lceil|lim|ln|log|longrightarrow|mapsto|mathbb|mathbf|mathcal|mathfrak|"
    "mathit|mathrm|mathsf|max|mbox|mid|min|mod|mu|n|nabla|ne|neq|noindent|nu|odot|oint|omega|operatorname|oplus|"
    "otimes|overline|overrightarrow|parallel|partial|perp|phi|pi|pm|pmod|pmod|prime|prod|propto|psi|qquad|quad|"
    "rangle|rceil|rfloor|rho|right|rightarrow|Rightarrow|rm|scriptstyle|sec|setminus|sigma|sim|sin|sqrt|stackrel|"
    "star|subset|subseteq|sum|sup|tan|tau|text|textbf|textit|textrm|textstyle|tfrac|theta|times|to|triangle|"
    "underbrace|underline|upsilon|varepsilon|varphi|vdots|vec|vee|vspace|wedge|widehat|widetilde|xi|zeta|Alpha|"
    "Beta|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega|r|t|b)"
)


def find_paths(text: str) -> Iterator[tuple[int, str]]:
    """Where each path begins, and the path.

    Args:
        text: Without addresses on the web, whose paths are nobody's.
    """
    for form in _FORMS:
        yield from ((match.start(), match.group()) for match in form.finditer(text))
    for match in _DRIVE.finditer(text):
        if match["next"] != "{" and not _begins_with_command(match["first"]):
            yield match.start(), match.group().rstrip()
    for match in _SHARE.finditer(text):
        parts = match["first"], match["second"]
        if match["next"] not in ("{", "_", "^", "(") and not any(map(_begins_with_command, parts)):
            yield match.start(), match.group().rstrip()


def _begins_with_command(part: str) -> bool:
    """Whether letters of a part are a command of LaTeX, as ``pi`` of ``pi)``."""
    letters = re.match(r"[A-Za-z]*", part)
    return letters is None or not letters.group() or _LATEX.fullmatch(letters.group()) is not None
