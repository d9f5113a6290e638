"""Planners against exhaustive ground truth: all subsets of six sites are trained, and each planner ranks them beforehand.

Command:  python -m experiments.planner truth STUDY --out runs/planner     (one line for each training; resumes)
          python -m experiments.planner rank STUDY --out runs/planner      (what each planner predicts, and what it costs)
          python -m experiments.planner report --out runs/planner          (Spearman, regret at each size, a figure)
          STUDY is stories (--model FOLDER --data TEXT), minilm (--model FOLDER --data TSV --test TSV), drop or narrow.
Runtime:  64 subsets x 2 seeds; at most two minutes for one training on one thread with the default steps.
Expected: docs/planner.md has what was run so far.
"""
