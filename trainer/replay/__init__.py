"""`cotune replay`: recorded episodes run again from a call on."""
