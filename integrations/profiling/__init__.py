"""`--profile`: where the seconds of one training step went. Learners and samplers note spans between `begin_trace` and
`end_trace`; `write_profile` adds them up."""
