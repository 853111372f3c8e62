"""Operations of the CPU."""
