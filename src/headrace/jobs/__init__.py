"""Batch jobs: lines of a file in, one answer or one error for each out.

The reader never looks at results, the writer never at the engine; `run` is where they meet.
"""
