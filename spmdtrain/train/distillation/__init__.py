"""Trains a student on what a teacher says, [distill]: its losses, and the teacher's weights."""
