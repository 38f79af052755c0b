"""Input lines to prepared requests, or to the error lines that they become; answers to output lines.

    InputLine ─▶ lines.LineParser            plain_lines, openai_lines: the two line formats
                   │ template                rows of a table become requests
                   ▼
               LineRequest │ BadLine         one or the other for each line, never neither
                   │ prepare.LinePreparer    renders chat templates, tokenizes in batches
                   ▼
               Work │ BadLine                all that the job keeps of a line until it is answered
                   │ job_checks.JobChecks    needs the whole job: ids used twice, grammars
                   ▼
               feed.Feed ─▶ the job's inbox  a thread that reads ahead, a bounded number of batches

    prepare_process, prepare_child, prepare_wire     `prepare` in another process, for inputs of many lines
    fields, field_names                              parameters and names, checked once for all lines with the same
    reply, line_output                               each line has a reply, which writes its output line as bytes
    tool_lines                                       tools of chat lines, read once for all lines that have the same
    part_requests                                    the engine's requests of a line with several prompts
    id_filter                                        ids that were seen, for millions of lines

- What depends on one line alone is in `prepare`, which may run in another process (msgpack over sockets).
  Batches come back in order. If that process ends, the job prepares the rest itself.
- Lines with the same parameters share one `SamplingParams`.
- A line's seed derives from the job's seed and its index: the answer does not depend on order, batch or process.
- Nothing is ignored silently: a parameter that would change the answer and is not supported is an error.
"""

from __future__ import annotations
