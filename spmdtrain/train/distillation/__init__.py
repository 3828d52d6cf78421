"""Trains a student on a teacher's predictions, [distill]: its losses, and the teacher's weights."""
