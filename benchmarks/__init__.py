"""What a handover costs, beside the same model built by hand and beside its neighbours; `make bench` runs it all."""
