"""What a handover costs, compared with the same model built by hand and with other libraries; `make bench` runs it all."""
