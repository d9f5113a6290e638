"""Conversion: a pretrained model in, a folder with the converted one out; what `segue convert` and `segue eval` do."""
