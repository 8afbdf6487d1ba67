"""FP8 weights under FSDP and FSDP2, which are whole only while their layers run."""
