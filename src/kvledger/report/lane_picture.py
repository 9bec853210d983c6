"""What became of one request, as a strip below the pictures of the pool."""

from __future__ import annotations

from collections.abc import Sequence

from kvledger.events import Round
from kvledger.report.experiment import output_words
from kvledger.report.lanes import Answer, Lane, Mark, Stretch
from kvledger.report.markup import Html, element
from kvledger.report.plain import counted
from kvledger.report.recording import Recording
from kvledger.report.svg import Columns, frame, group, percent

HEIGHT = 32
_MIDDLE = HEIGHT // 2
_STRIP = 12
_NOTES = {"failed": ", OUT OF MEMORY", "not-run": ", not run: the process died", "forced": ", FORCED"}


def axis(recording: Recording, columns: Columns) -> Html:
    """The numbers of the rounds: each one, or about half a dozen."""
    every = 1 if columns.labelled else -(-columns.count // 6)
    texts = []
    for index in range(columns.first, columns.end, every):
        # on a phone there is room for about every other one
        place = columns.label_class if columns.labelled and (index - columns.first) % 2 else ""
        number = recording.rounds[index].record.round
        texts.append(element("text", number, class_=place.strip() or None, x=columns.x(index + 0.5), y=12))
    return frame(16, None, texts, class_="axis")


def lane_picture(lane: Lane, recording: Recording, columns: Columns) -> Html:
    """One request in these columns: waiting, chunks with their load-backs, refusals, in flight until it ends."""
    shapes = [_stretch(stretch, recording, columns) for stretch in lane.stretches]
    answers = [answer for answer in lane.answers if columns.first <= answer.round_index < columns.end]
    shapes += [_refusals(run, recording, columns) for run in _refused_runs(answers)]
    shapes += [_chunk(answer, lane, recording, columns) for answer in answers if answer.decision.joined]
    shapes += [_mark(mark, recording, columns) for mark in lane.marks]
    if lane.ended is not None:
        step, how = lane.ended
        place = recording.steps[step].rounds_before
        if columns.first <= place <= columns.end:
            line = element(
                "line",
                class_=f"ended {how.replace(' ', '-')}",
                x1=columns.x(place),
                x2=columns.x(place),
                y1=3,
                y2=HEIGHT - 3,
            )
            shapes.append(group(f"{how} {_when(recording, step)}", line))
    return frame(HEIGHT, None, shapes)


def _mark(mark: Mark, recording: Recording, columns: Columns) -> Html:
    """Where a running request lost its slots; that one was given up is drawn as its end."""
    place = recording.steps[mark.step].rounds_before
    if mark.what == "given up" or not columns.first <= place < columns.end:
        return Html("")
    line = element("line", class_="setback", x1=columns.x(place), x2=columns.x(place), y1=3, y2=HEIGHT - 3)
    return group(f"{mark.what} {_when(recording, mark.step)}", line)


def lane_words(lane: Lane, recording: Recording) -> str:
    """The strip in words, for those who cannot see it."""
    joined = [answer for answer in lane.answers if answer.decision.joined]
    asked = output_words(lane.output)
    words = [counted(lane.prompt_tokens, "token"), *([asked] if asked else [])]
    if joined:
        words.append(f"admitted in round {recording.rounds[joined[0].round_index].record.round}")
        words.append(counted(len(joined), "chunk"))
    refused = sum(answer.decision.kind == "refused" for answer in lane.answers)
    if refused:
        words.append(f"refused {refused} times" if refused > 1 else "refused once")
    words += [f"{mark.what} {_when(recording, mark.step)}" for mark in lane.marks if mark.what != "given up"]
    if lane.failed_step is not None:
        words.append(f"out of memory {_when(recording, lane.failed_step)}")
    elif lane.ended is not None:
        words.append(f"{lane.ended[1]} {_when(recording, lane.ended[0])}")
    elif lane.state is not None:
        words.append(f"still {lane.state} at the end")
    return ", ".join(words)


def _when(recording: Recording, step: int) -> str:
    before = recording.steps[step].rounds_before
    if isinstance(recording.steps[step].event, Round):
        return f"in round {recording.rounds[before].record.round}"
    return f"after round {recording.rounds[before - 1].record.round}" if before else "before the first round"


def _stretch(stretch: Stretch, recording: Recording, columns: Columns) -> Html:
    begins = recording.steps[stretch.begins]
    last = len(recording.rounds) if stretch.ends is None else recording.steps[stretch.ends].rounds_before
    first, last = max(begins.rounds_before + isinstance(begins.event, Round), columns.first), min(last, columns.end)
    if last <= first:
        return Html("")
    until = "to the end" if stretch.ends is None else f"ended {_when(recording, stretch.ends)}"
    shape = element(
        "rect",
        class_=stretch.kind.replace(" ", "-"),
        x=columns.x(first),
        width=percent(100 * (last - first) / columns.count),
        y=_MIDDLE - 2,
        height=4,
    )
    return group(f"{stretch.kind}, begun {_when(recording, stretch.begins)}, {until}", shape)


def _refused_runs(answers: Sequence[Answer]) -> list[list[Answer]]:
    """Refusals in neighbouring rounds for the same reason together; a deferral is one without a reason."""
    runs: list[list[Answer]] = []
    for answer in answers:
        if answer.decision.joined:
            continue
        last = runs[-1][-1] if runs else None
        follows = last is not None and answer.round_index == last.round_index + 1
        if last is not None and follows and answer.decision.reason == last.decision.reason:
            runs[-1].append(answer)
        else:
            runs.append([answer])
    return runs


def _refusals(run: list[Answer], recording: Recording, columns: Columns) -> Html:
    first, word = run[0].round_index, str(run[0].decision.reason or run[0].decision.kind)
    shapes = [element("rect", class_="refused", y=5, height=HEIGHT - 10, **columns.bar(first, len(run)))]
    if columns.labelled:
        shapes.append(
            element(
                "text",
                word,
                class_=f"on refused{columns.label_class}",
                x=columns.x(first + len(run) / 2),
                y=_MIDDLE + 4,
            )
        )
    times = f" and in the {len(run) - 1} after it" if len(run) > 1 else ""
    return group(f"{word} in round {recording.rounds[first].record.round}{times}", *shapes)


def _chunk(answer: Answer, lane: Lane, recording: Recording, columns: Columns) -> Html:
    decision = answer.decision
    kind = "failed" if answer.step == lane.failed_step else "forced" if decision.forced else str(decision.kind)
    if not answer.ran and kind != "failed":
        kind = "not-run"
    bar = columns.bar(answer.round_index)
    shapes = [element("rect", class_=kind, y=2, height=HEIGHT - 4, **bar)]
    if decision.load_back:
        shapes.append(element("rect", class_="load-back", y=2, height=_STRIP, **bar))
    missing = answer.missing_tokens
    if missing:
        shapes.append(element("rect", class_="missing short", y=HEIGHT - 2 - _STRIP, height=_STRIP, **bar))
    if columns.labelled:
        middle = columns.x(answer.round_index + 0.5)
        y = _MIDDLE + 4 + (_STRIP // 2 if decision.load_back else 0) - (_STRIP // 2 if missing else 0)
        shapes.append(element("text", decision.tokens, class_=f"on {kind}{columns.label_class}", x=middle, y=y))
        if decision.load_back and not columns.label_class:
            words = f"load-back {decision.load_back}"
            shapes.append(element("text", words, class_="on load-back wide", x=middle, y=_STRIP))
    words = f"{decision.kind}: {decision.start}..{decision.end} ({decision.tokens})"
    words += f", load-back {decision.load_back}" if decision.load_back else ""
    words += f", tail {decision.tail_tokens}" if decision.tail_tokens else ""
    words += f", of which no entry holds {missing} (in whole pages)" if missing else ""
    number = recording.rounds[answer.round_index].record.round
    return group(f"round {number}, {words}{_NOTES.get(kind, '')}", *shapes)
