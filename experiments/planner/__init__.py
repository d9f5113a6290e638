"""Planners against exhaustive ground truth: all subsets of six sites are trained, and each planner ranks them beforehand.

Command:  python -m experiments.planner truth STUDY     (one line for each training, in runs/planner; resumes)
          python -m experiments.planner rank STUDY      (what each planner predicts, and what it costs)
          python -m experiments.planner report          (Spearman, regret at each size, figures; of the committed results)
          STUDY is stories (--model FOLDER --data TEXT), minilm (--model FOLDER --data TSV --test TSV), drop, narrow or linear.
Runtime:  63 subsets x 2 seeds; a training takes 1 to 5 seconds on one free core, a ranking one to two minutes.
Expected: docs/planner.md has the tables; results/ what they are made of.
"""
