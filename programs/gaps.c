/*
 * Source C's experiment: tens of thousands of mappings, many of which are unmapped and mapped again in each round. Their
 * sizes are random, and neighbours differ in protection, so that they do not merge: free space lies in fragments.
 */
#include "terrane.h"

static double mappings = 20000, changes = 500, rounds = 8;

struct piece {
	char *at;
	size_t length;
};

static uint64_t random_state = 1;

static struct piece make(size_t number)
{
	static const int protections[] = { PROT_READ, PROT_READ | PROT_WRITE, PROT_NONE, PROT_READ | PROT_EXEC };
	struct piece piece = { .length = (1 + next_random(&random_state) % 8) * PAGE };
	/* Nobody but the search chooses where. */
	piece.at = map(piece.length, protections[number % 4]);
	if (number % 4 == 1)
		*(size_t *)piece.at = number;
	return piece;
}

int main(int argc, char **argv)
{
	options(argc, argv, "tens of thousands of mappings, unmapped and mapped again (source C)", (struct option_of[]){
		{ 'n', "mappings", &mappings, 16, 60000 },
		{ 'c', "mappings changed in a round", &changes, 1, 60000 },
		{ 'r', "rounds", &rounds, 1, 100000 },
		{ 0 } });
	size_t count = mappings;
	struct piece *pieces = calloc(count, sizeof *pieces);
	if (!pieces)
		failed("calloc");
	double began = now();
	for (size_t i = 0; i < count; i++)
		pieces[i] = make(i);
	figure("set-up", (now() - began) / count * 1e6, "us");
	double worst = 0, sum = 0;
	for (int round = 0; round < rounds; round++) {
		size_t change = changes;
		began = now();
		for (size_t i = 0; i < change; i++) {
			size_t chosen = next_random(&random_state) % count;
			unmap(pieces[chosen].at, pieces[chosen].length);
			pieces[chosen].at = NULL;
			size_t other = next_random(&random_state) % count;
			if (pieces[other].at)
				unmap(pieces[other].at, pieces[other].length);
			pieces[other].at = NULL;
			pieces[chosen] = make(chosen);
			if (other != chosen)
				pieces[other] = make(other);
		}
		double took = now() - began;
		sum += took;
		worst = took > worst ? took : worst;
	}
	figure("round", sum / rounds * 1e3, "ms");
	figure("round-worst", worst * 1e3, "ms");
	size_t right = 0;
	for (size_t i = 1; i < count; i += 4)
		right += *(size_t *)pieces[i].at == i;
	printf("%zu mappings, %zu of %zu hold what was stored\n", count, right, (count + 2) / 4);
	return right == (count + 2) / 4 ? 0 : 1;
}
