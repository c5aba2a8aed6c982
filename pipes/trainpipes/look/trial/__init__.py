"""A pipeline run alone, as a trainer would run it, and measured: what ``trainpipes run`` does.

memory        how much of it a process and its workers have
batch_counts  rows, tokens and padding of batches
stage_clock   where the time goes, stage by stage
report        what was measured
advice        what stands out, with the line to write
trial         the run
"""
