"""A replay as text for a tired reader on a terminal of 100 columns: who was promised what, and who spent it.

Pure functions, from records to lines. Names and messages come from traces, so all of them pass through `plain`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvledger.events import Event
from kvledger.record import RoundRecord
from kvledger.replay import Broken, Happening, Outcome
from kvledger.report import Replayed
from kvledger.report.experiment import SHARES, Sized, found_at_start, node_words, sum_words, switches
from kvledger.report.plain import COLUMNS, NAME_COLUMNS, counted, named, plain, width, wrapped
from kvledger.report.rounds import Gap, Layout, failure_words, gap_lines, round_lines, rounds_to_show

ALIGNED_NAME_COLUMNS = 16
"""A longer name shifts its own row, not the table."""
TITLE_COLUMNS = 300
REASON_COLUMNS = 400
NAMES_SHOWN = 5
_LEDGER = (
    "Figures are tokens: the ledger's baseline, cur_rem_tokens, rem_total_tokens and rem_chunk_tokens",
    "as they stood right after each decision.",
)
_NO_LEDGER = ("Figures are tokens. Those of a ledger are not among them: this target shows none.",)
REJECTIONS_SHOWN = 10


def replay_lines(replayed: Replayed, *, all_rounds: bool = False) -> list[str]:
    """The whole report of one trace. `all_rounds` leaves nothing out."""
    outcome = replayed.outcome
    shown = [*outcome.rounds] if all_rounds else rounds_to_show(outcome)
    layout = Layout.of(replayed.trace, _name_columns(outcome), everything=all_rounds, figures=replayed.shows_figures)
    lines = heading_lines(replayed)
    for each in shown:
        lines.append("")
        lines += _between_lines(outcome, each)
        if isinstance(each, Gap):
            lines += gap_lines(each)
        else:
            lines += round_lines(each, [broken for broken in outcome.broken if broken.round == each.round], layout)
    afterwards = [each for each in outcome.happenings if outcome.rounds and each.rounds == len(outcome.rounds)]
    if afterwards:
        lines += ["", *wrapped(f"afterwards: {_happened(afterwards)}", 2)]
    return [*lines, "", *ending_lines(replayed)]


def _between_lines(outcome: Outcome, shown: RoundRecord | Gap) -> list[str]:
    """What happened before this round and after the one before it; the heading tells what came before the first."""
    if isinstance(shown, Gap) or shown.round == 1:
        return []
    happenings = [each for each in outcome.happenings if each.rounds == shown.round - 1]
    return [*wrapped(f"meanwhile: {_happened(happenings)}", 2), ""] if happenings else []


def _happened(happenings: Sequence[Happening]) -> str:
    """Grouped by what happened, in the order in which each first did."""
    grouped: dict[str, list[Sized]] = {}
    for each in happenings:
        grouped.setdefault(each.what, []).append(Sized(each.name, each.tokens, each.output, each.note))
    return "; ".join(f"{what} {_named_sizes(sizes)}" for what, sizes in grouped.items())


def _name_columns(outcome: Outcome) -> int:
    widths = {width(named(decision.request)) for record in outcome.rounds for decision in record.decisions}
    return max((columns for columns in widths if columns <= ALIGNED_NAME_COLUMNS), default=0)


def summary_line(replays: Sequence[Replayed]) -> str:
    """What became of several traces."""
    failed = [replayed for replayed in replays if not replayed.passed]
    names = [plain(replayed.source, 60) for replayed in failed[:NAMES_SHOWN]]
    if len(failed) > len(names):
        names.append(f"and {len(failed) - len(names)} more")
    listed = f": {', '.join(names)}" if names else ""
    return f"{counted(len(replays), 'trace')}, {len(failed)} not as they should be{listed}"


# --- the heading


def heading_lines(replayed: Replayed) -> list[str]:
    """The experiment: where it comes from, its rules and sizes, and what is there at the start."""
    trace = replayed.trace
    return [
        f"=== {plain(replayed.source, COLUMNS - 8)} ===",
        *wrapped(plain(trace.title, TITLE_COLUMNS)),
        *wrapped(f"rules  {replayed.preset or 'own switches'} ({switches(replayed.rules)})", 7),
        *wrapped(f"node   {node_words(trace.node)}", 7),
        *_start_lines(trace.events, replayed.outcome.happenings),
        *(_LEDGER if replayed.shows_figures else _NO_LEDGER),
        *(wrapped(SHARES) if replayed.shows_figures and trace.node.mode == "unified" else ()),
    ]


def _start_lines(events: Sequence[Event], happenings: Sequence[Happening]) -> list[str]:
    words = [f"{what}: {_named_sizes(sizes)}" for what, sizes in found_at_start(events, happenings).items()]
    marks = ["start  ", *[" " * 7] * len(words)]
    return [line for mark, each in zip(marks, words, strict=False) for line in wrapped(mark + each, 9)]


def _named_sizes(sizes: Sequence[Sized]) -> str:
    if len(sizes) > NAMES_SHOWN:
        return sum_words(sizes)
    return ", ".join(f"{named(each.name)}{each.words}" for each in sizes)


# --- how it ended


def ending_lines(replayed: Replayed) -> list[str]:
    """What was never admitted, what broke, the verdict, and whether it was expected."""
    outcome = replayed.outcome
    lines = _rejection_lines(outcome.rejected_at_submit)
    if outcome.broken:
        lines.append("broken invariants, in time order")
        for broken in outcome.broken:
            lines += wrapped(f"  round {broken.round}  {broken.invariant}: {_message(broken)}", 6)
    if replayed.skipped:
        lines += wrapped(f"not asked, because this target cannot show it: {', '.join(replayed.skipped)}", 6)
    if outcome.unstruck:
        armed = ", ".join(f"{kind} {named(rid)}" for kind, rid in outcome.unstruck)
        lines += wrapped(f"armed and never struck: {armed}", 6)
    if lines:
        lines.append("")
    return [*lines, *wrapped(f"verdict  {outcome.verdict}{_why(outcome)}", 9), *_expectation(replayed)]


def _rejection_lines(rejected: Sequence[tuple[str, str]]) -> list[str]:
    lines: list[str] = []
    for request, reason in rejected[:REJECTIONS_SHOWN]:
        lines += wrapped(f"rejected at submit: {named(request)}: {plain(reason, REASON_COLUMNS)}", 6)
    if len(rejected) > REJECTIONS_SHOWN:
        lines.append(f"rejected at submit: {len(rejected) - REJECTIONS_SHOWN} more")
    return lines


def _message(broken: Broken) -> str:
    """The message; a very long name in it is cut to what the rounds call it."""
    name = broken.request
    if name is None or len(name) <= NAME_COLUMNS:
        return plain(broken.message, REASON_COLUMNS)
    return named(name).join(plain(part, REASON_COLUMNS) for part in broken.message.split(name))


def _why(outcome: Outcome) -> str:
    if outcome.failure is not None:
        return f" in round {outcome.rounds[-1].round}: {failure_words(outcome.failure)}"
    if outcome.stuck is not None:
        stuck = outcome.stuck
        return (
            f" in round {stuck.round}: {named(stuck.request)} still has {counted(stuck.wanted, 'token')} to compute; "
            f"free {stuck.free}, evictable {stuck.evictable}; {plain(stuck.message, REASON_COLUMNS)}"
        )
    return f" in round {outcome.broken[0].round}" if outcome.broken else ""


def _expectation(replayed: Replayed) -> list[str]:
    if replayed.expected is None:
        return []
    words = "as expected" if replayed.passed else f"NOT as expected: the trace expects {replayed.expected}"
    return [f"         {words} under {replayed.preset}"]
