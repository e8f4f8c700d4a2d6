/* SPDX-License-Identifier: Apache-2.0 */
/* Choosing what stays, and cutting the rest into parts. */

#include "daemon/model/placement.h"

#include <string.h>

/* A product of the graph: its matrices, side by side in its result, or gate and up. */
typedef struct Product {
    PlacementUse use;
    uint32_t layer, n_matrices;
    const WeightsMatrix *matrices[3];
} Product;

/* What is being decided. */
typedef struct Choice {
    const Weights *weights;
    const PlacementLimits *limits;
    uint64_t available;   /* without norms and window */
    uint64_t part_bytes;  /* largest part, when possible */
    uint32_t n_slots;
    Placement *placement;
} Choice;

void placement_clear(Placement *placement)
{
    free(placement->kinds);
    free(placement->pieces);
    free(placement->parts);
    free(placement->span_parts);
    *placement = PLACEMENT_NULL;
}

/* ---- products --------------------------------------------------------------------------------------------------------------- */

/* Products of a span in order; at most four. */
static uint32_t span_products(const Weights *weights, uint32_t span, Product ret[static 4])
{
    uint32_t n = 0;

    if (span > 0) {
        const WeightsMatrix *tensors = weights->layers[span - 1].tensors;

        ret[n++] = (Product){PLACEMENT_O, span - 1, 1, {&tensors[WEIGHTS_O]}};
        ret[n++] = (Product){PLACEMENT_GATED, span - 1, 2, {&tensors[WEIGHTS_GATE], &tensors[WEIGHTS_UP]}};
        ret[n++] = (Product){PLACEMENT_DOWN, span - 1, 1, {&tensors[WEIGHTS_DOWN]}};
    }
    if (span < weights->n_layers) {
        const WeightsMatrix *tensors = weights->layers[span].tensors;

        ret[n++] = (Product){PLACEMENT_QKV, span, 3, {&tensors[WEIGHTS_Q], &tensors[WEIGHTS_K], &tensors[WEIGHTS_V]}};
    }
    return n;
}

static Product head_product(const Weights *weights)
{
    return (Product){PLACEMENT_HEAD, 0, 1, {&weights->output}};
}

static uint32_t n_tiles(const WeightsMatrix *matrix)
{
    return (matrix->n_rows + WEIGHT_TILE_ROWS - 1) / WEIGHT_TILE_ROWS;
}

static uint64_t aligned(uint64_t bytes)
{
    return (bytes + WEIGHTS_ALIGNMENT - 1) & ~(uint64_t)(WEIGHTS_ALIGNMENT - 1);
}

static uint64_t product_bytes(const Product *product)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < product->n_matrices; i++)
        bytes += aligned(n_tiles(product->matrices[i]) * product->matrices[i]->tile_bytes);
    return bytes;
}

/* The least that one launch can work on. */
static uint64_t product_least_bytes(const Product *product)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < product->n_matrices; i++) {
        uint64_t tile = aligned(product->matrices[i]->tile_bytes);

        bytes = product->use == PLACEMENT_GATED ? bytes + tile : MAX(bytes, tile);
    }
    return bytes;
}

static uint64_t least_part_bytes(const Weights *weights)
{
    Product products[4], head = head_product(weights);
    uint64_t bytes = product_least_bytes(&head);

    for (uint32_t s = 0; s < weights_n_spans(weights); s++)
        for (uint32_t i = 0, n = span_products(weights, s, products); i < n; i++)
            bytes = MAX(bytes, product_least_bytes(&products[i]));
    return bytes;
}

/* ---- parts ------------------------------------------------------------------------------------------------------------------ */

static int grow(void **array, uint32_t n, size_t size)
{
    void *grown;

    if (n > 0 && (n & (n - 1)) != 0)
        return 0; /* doubles at powers of two */
    grown = realloc(*array, (n > 0 ? 2 * (size_t)n : 1) * size);
    if (!grown)
        return error_origin(-ENOMEM);
    *array = grown;
    return 0;
}

static int add_part(Placement *placement, uint32_t block, bool streamed)
{
    void *parts = placement->parts;
    int r = grow(&parts, placement->n_parts, sizeof(*placement->parts));

    placement->parts = parts;
    if (!r)
        placement->parts[placement->n_parts++] =
            (PlacementPart){.first_piece = placement->n_pieces, .block = block, .streamed = streamed};
    return r;
}

static int add_piece(Placement *placement, const Product *product, uint32_t y_first, PlacementPiece **ret)
{
    void *pieces = placement->pieces;
    int r = grow(&pieces, placement->n_pieces, sizeof(*placement->pieces));

    placement->pieces = pieces;
    if (r)
        return r;
    *ret = &placement->pieces[placement->n_pieces++];
    **ret = (PlacementPiece){.use = product->use, .layer = product->layer, .y_first = y_first};
    placement->parts[placement->n_parts - 1].n_pieces++;
    return 0;
}

/* Tiles [first, first + n) of one matrix, behind what the part holds; in a buffer that is the block, where they are in it. */
static void add_slice(Placement *placement, PlacementPiece *piece, const WeightsMatrix *matrix, uint32_t first, uint32_t n)
{
    PlacementPart *part = &placement->parts[placement->n_parts - 1];
    PlacementSlice *slice = &piece->slices[piece->n_slices++];
    uint32_t end = MIN((first + n) * WEIGHT_TILE_ROWS, matrix->n_rows);

    *slice = (PlacementSlice){
        .matrix = matrix,
        .n_rows = end - first * WEIGHT_TILE_ROWS,
        .from = matrix->offset + first * matrix->tile_bytes,
        .bytes = n * matrix->tile_bytes,
    };
    slice->to = part->streamed ? part->bytes : slice->from;
    part->bytes += aligned(slice->bytes);
}

static int add_whole(Placement *placement, const Product *product)
{
    PlacementPiece *piece;
    int r = add_piece(placement, product, 0, &piece);

    for (uint32_t i = 0; i < product->n_matrices && !r; i++)
        add_slice(placement, piece, product->matrices[i], 0, n_tiles(product->matrices[i]));
    return r;
}

/* Tiles of one part when each takes @tile_bytes: one at least. */
static uint32_t tiles_at_once(const Choice *choice, uint64_t tile_bytes, const WeightsMatrix *matrix)
{
    uint64_t n = MIN(choice->part_bytes / tile_bytes, (uint64_t)n_tiles(matrix));

    return n > 0 ? (uint32_t)n : 1;
}

/* The same tiles of gate and up, which become the same columns. */
static int cut_gated(const Choice *choice, const Product *product, uint32_t block)
{
    const WeightsMatrix *gate = product->matrices[0], *up = product->matrices[1];
    uint32_t at_once = tiles_at_once(choice, aligned(gate->tile_bytes) + aligned(up->tile_bytes), gate), n;
    PlacementPiece *piece;
    int r = 0;

    for (uint32_t first = 0; first < n_tiles(gate) && !r; first += n) {
        n = MIN(at_once, n_tiles(gate) - first);
        r = add_part(choice->placement, block, true);
        if (!r)
            r = add_piece(choice->placement, product, first * WEIGHT_TILE_ROWS, &piece);
        if (r)
            return r;
        add_slice(choice->placement, piece, gate, first, n);
        add_slice(choice->placement, piece, up, first, n);
    }
    return 0;
}

/* Tiles [begin, end) of each of matrices whose results lie side by side; one matrix a part. */
static int cut_rows(const Choice *choice, const Product *product, uint32_t block, uint32_t begin, uint32_t end)
{
    uint32_t y_first = 0;

    for (uint32_t i = 0; i < product->n_matrices; i++) {
        const WeightsMatrix *matrix = product->matrices[i];
        uint32_t at_once = tiles_at_once(choice, aligned(matrix->tile_bytes), matrix), last = MIN(end, n_tiles(matrix)), n;
        PlacementPiece *piece;
        int r = 0;

        for (uint32_t first = begin; first < last; first += n) {
            n = MIN(at_once, last - first);
            r = add_part(choice->placement, block, true);
            if (!r)
                r = add_piece(choice->placement, product, y_first + first * WEIGHT_TILE_ROWS, &piece);
            if (r)
                return r;
            add_slice(choice->placement, piece, matrix, first, n);
        }
        y_first += matrix->n_rows;
    }
    return 0;
}

/* A span in parts: whole products together as far as they fit, large ones cut. */
static int cut_span(const Choice *choice, uint32_t span)
{
    Placement *placement = choice->placement;
    uint32_t block = WEIGHTS_BLOCK_SPANS + span, n;
    bool open = false;
    Product products[4];
    int r = 0;

    n = span_products(choice->weights, span, products);
    for (uint32_t i = 0; i < n && !r; i++) {
        uint64_t bytes = product_bytes(&products[i]);

        if (bytes > choice->part_bytes) {
            open = false;
            r = products[i].use == PLACEMENT_GATED ? cut_gated(choice, &products[i], block)
                                                   : cut_rows(choice, &products[i], block, 0, UINT32_MAX);
            continue;
        }
        if (!open || placement->parts[placement->n_parts - 1].bytes + bytes > choice->part_bytes)
            r = add_part(placement, block, true);
        open = true;
        if (!r)
            r = add_whole(placement, &products[i]);
    }
    return r;
}

static int whole_span(const Choice *choice, uint32_t span)
{
    Product products[4];
    uint32_t n = span_products(choice->weights, span, products);
    int r = add_part(choice->placement, WEIGHTS_BLOCK_SPANS + span, false);

    for (uint32_t i = 0; i < n && !r; i++)
        r = add_whole(choice->placement, &products[i]);
    return r;
}

/* Tiles [first, end) of the head that stay, as one part. */
static int add_head_rows(const Choice *choice, const Product *head, uint64_t first, uint64_t end)
{
    PlacementPiece *piece;
    int r = add_part(choice->placement, head->matrices[0]->block, false);

    if (!r)
        r = add_piece(choice->placement, head, (uint32_t)first * WEIGHT_TILE_ROWS, &piece);
    if (!r)
        add_slice(choice->placement, piece, head->matrices[0], (uint32_t)first, (uint32_t)(end - first));
    return r;
}

/* Tiles that stay and tiles that stream take turns, so that what stays gives copies time here as well. */
static int cut_head(const Choice *choice)
{
    const WeightsMatrix *output = &choice->weights->output;
    PlacementKind kind = choice->placement->kinds[output->block];
    uint64_t all = n_tiles(output), stay = choice->placement->head_rows / WEIGHT_TILE_ROWS, at_once, n_streamed, n_turns, turn = 0;
    Product head = head_product(choice->weights);
    int r = 0;

    if (kind != PLACEMENT_STREAMED && kind != PLACEMENT_ROWS)
        return add_head_rows(choice, &head, 0, all);
    at_once = tiles_at_once(choice, aligned(output->tile_bytes), output);
    n_streamed = (all - stay + at_once - 1) / at_once;
    n_turns = MIN(stay, n_streamed);
    n_turns = MIN(n_turns, 4 * stay / at_once + 1); /* a quarter of a part is worth a launch */
    for (uint64_t i = 0; i < n_streamed && !r; i++) {
        uint64_t first = stay + i * at_once;

        if (turn < n_turns && turn * n_streamed <= i * n_turns) {
            r = add_head_rows(choice, &head, stay * turn / n_turns, stay * (turn + 1) / n_turns);
            turn++;
        }
        if (!r)
            r = cut_rows(choice, &head, output->block, (uint32_t)first, (uint32_t)MIN(first + at_once, all));
    }
    return r;
}

static int make_parts(const Choice *choice)
{
    Placement *placement = choice->placement;
    uint32_t n_spans = weights_n_spans(choice->weights);
    int r = 0;

    placement->n_parts = placement->n_pieces = 0;
    for (uint32_t s = 0; s < n_spans && !r; s++) {
        placement->span_parts[s] = placement->n_parts;
        r = placement->kinds[WEIGHTS_BLOCK_SPANS + s] == PLACEMENT_STREAMED ? cut_span(choice, s) : whole_span(choice, s);
    }
    placement->span_parts[n_spans] = placement->n_parts;
    return r ? r : cut_head(choice);
}

/* ---- choice ----------------------------------------------------------------------------------------------------------------- */

static bool may_be_whole(const Choice *choice, uint32_t block)
{
    return choice->weights->blocks[block].bytes <= choice->limits->max_allocation_bytes;
}

static bool all_fits(const Choice *choice)
{
    for (uint32_t i = 0; i < choice->weights->n_blocks; i++)
        if (!may_be_whole(choice, i))
            return false;
    return weights_total_bytes(choice->weights) <= choice->limits->budget_bytes && choice->limits->max_layers >= choice->weights->n_layers;
}

/* Whether span @s streams when @n of all do: evenly spread. */
static bool streams(uint32_t s, uint32_t n, uint32_t n_spans)
{
    return (uint64_t)(s + 1) * n / n_spans > (uint64_t)s * n / n_spans;
}

/* What does not stay on the device, one way or the other. */
static PlacementKind elsewhere(const Choice *choice, uint32_t block)
{
    if (choice->limits->in_place && may_be_whole(choice, block))
        return PLACEMENT_IN_PLACE;
    return block == WEIGHTS_BLOCK_EMBEDDING ? PLACEMENT_ROWS : PLACEMENT_STREAMED;
}

/* As many spans as fit in @room; what they take. */
static uint64_t choose_spans(const Choice *choice, uint64_t room)
{
    const Weights *weights = choice->weights;
    uint32_t n_spans = weights_n_spans(weights), most = choice->limits->max_layers >= weights->n_layers ? n_spans : choice->limits->max_layers;

    for (uint32_t n = n_spans - MIN(most, n_spans);; n++) {
        uint64_t bytes = 0;

        for (uint32_t s = 0; s < n_spans; s++) {
            uint32_t block = WEIGHTS_BLOCK_SPANS + s;
            bool stays = !streams(s, n, n_spans) && may_be_whole(choice, block);

            choice->placement->kinds[block] = stays ? PLACEMENT_DEVICE : elsewhere(choice, block);
            bytes += stays ? weights->blocks[block].bytes : 0;
        }
        if (bytes <= room || n == n_spans)
            return bytes;
    }
}

/* The head with what is left: whole, or its first rows when the rest streams. */
static uint64_t choose_head(const Choice *choice, uint64_t room)
{
    const WeightsMatrix *output = &choice->weights->output;
    uint32_t block = output->block;
    uint64_t limit = MIN(room, choice->limits->max_allocation_bytes), tiles;
    Placement *placement = choice->placement;

    placement->head_rows = 0;
    if (choice->weights->blocks[block].bytes <= limit) {
        placement->kinds[block] = PLACEMENT_DEVICE;
        return choice->weights->blocks[block].bytes;
    }
    placement->kinds[block] = elsewhere(choice, block);
    if (placement->kinds[block] == PLACEMENT_IN_PLACE)
        return 0;
    tiles = MIN(limit / output->tile_bytes, (uint64_t)n_tiles(output) - 1);
    placement->head_rows = (uint32_t)tiles * WEIGHT_TILE_ROWS;
    return tiles * output->tile_bytes;
}

/* The head's share of what stays, by bytes: with all of it streamed its copies would be in a row, without anything else to do meanwhile. */
static uint64_t head_share(const Choice *choice, uint64_t room)
{
    const Weights *weights = choice->weights;
    const WeightsMatrix *output = &weights->output;
    uint64_t pass = weights->blocks[output->block].bytes;

    if (elsewhere(choice, output->block) == PLACEMENT_IN_PLACE)
        return 0;
    for (uint32_t s = 0; s < weights_n_spans(weights); s++)
        pass += weights->blocks[WEIGHTS_BLOCK_SPANS + s].bytes;
    return MIN(room / (pass / n_tiles(output)), (uint64_t)n_tiles(output)) * output->tile_bytes;
}

/* Spans and head in @room. */
static void choose_passes(const Choice *choice, uint64_t room)
{
    uint64_t spans = choose_spans(choice, room - MIN(room, head_share(choice, room)));

    (void)choose_head(choice, room - spans);
}

static uint64_t largest_streamed_part(const Placement *placement, uint32_t *ret_n)
{
    uint64_t bytes = 0;

    *ret_n = 0;
    for (uint32_t i = 0; i < placement->n_parts; i++)
        if (placement->parts[i].streamed) {
            bytes = MAX(bytes, placement->parts[i].bytes);
            ++*ret_n;
        }
    return bytes;
}

/* The whole of it for one size of parts and one number of slots; false when the slots do not fit. */
static int try(Choice *choice, bool *ret_fits)
{
    Placement *placement = choice->placement;
    uint64_t ring = choice->n_slots * choice->part_bytes;
    uint32_t n_streamed;
    int r;

    *ret_fits = ring <= choice->available;
    if (!*ret_fits)
        return 0;
    choose_passes(choice, choice->available - ring);
    r = make_parts(choice);
    if (r)
        return r;
    placement->slot_bytes = largest_streamed_part(placement, &n_streamed);
    placement->n_slots = MIN(choice->n_slots, n_streamed);
    return 0;
}

static uint64_t largest_span_bytes(const Weights *weights)
{
    uint64_t bytes = 0;

    for (uint32_t s = 0; s < weights_n_spans(weights); s++)
        bytes = MAX(bytes, weights->blocks[WEIGHTS_BLOCK_SPANS + s].bytes);
    return bytes;
}

/* Parts as large as half of what is available allows, the head's no larger than a span needs; then as small as can be; then fewer slots. */
static int try_all(Choice *choice, bool *ret_fits)
{
    uint64_t least = least_part_bytes(choice->weights), span = largest_span_bytes(choice->weights), most = MIN(span, PLACEMENT_PART_BYTES);
    int r = 0;

    *ret_fits = false;
    for (uint32_t slots = choice->limits->n_slots; slots > 0 && !*ret_fits && !r; slots--)
        for (int small = 0; small < 2 && !*ret_fits && !r; small++) {
            uint64_t half = choice->available / 2 / slots, large = MIN(half, most);

            choice->n_slots = slots;
            choice->part_bytes = small ? least : MAX(large, least);
            r = try(choice, ret_fits);
        }
    return r;
}

/* What is read in place needs no ring; nor does an embedding of which only rows are brought. */
static int try_without_ring(Choice *choice, bool *ret_fits)
{
    uint32_t n_streamed;
    int r;

    choice->n_slots = 0;
    choice->part_bytes = PLACEMENT_PART_BYTES;
    choose_passes(choice, choice->available);
    r = make_parts(choice);
    *ret_fits = !r && largest_streamed_part(choice->placement, &n_streamed) == 0;
    return r;
}

static void choose_embedding(const Choice *choice)
{
    const Weights *weights = choice->weights;

    if (!weights_tied(weights))
        choice->placement->kinds[WEIGHTS_BLOCK_EMBEDDING] = elsewhere(choice, WEIGHTS_BLOCK_EMBEDDING);
}

/* Room for the embedding rows of some tokens; whether it is used shows when the head is placed. */
static void choose_window(Choice *choice)
{
    const WeightsMatrix *embedding = &choice->weights->embedding;
    uint32_t most = MIN(choice->limits->max_rows, (uint32_t)PLACEMENT_WINDOW_ROWS);
    uint64_t rows = choice->available / 8 / embedding->tile_bytes;

    rows = rows == 0 ? 1 : MIN(rows, (uint64_t)most);
    choice->placement->window_rows = (uint32_t)rows;
    choice->placement->window_bytes = rows * embedding->tile_bytes;
    choice->available -= MIN(choice->available, choice->placement->window_bytes);
}

static void sum_up(const Weights *weights, Placement *placement)
{
    const WeightsMatrix *output = &weights->output;

    if (placement->kinds[WEIGHTS_BLOCK_EMBEDDING] != PLACEMENT_ROWS)
        placement->window_rows = 0, placement->window_bytes = 0;
    if (placement->n_slots == 0)
        placement->slot_bytes = 0;
    placement->device_bytes = placement->in_place_bytes = placement->streamed_bytes = 0;
    for (uint32_t i = 0; i < weights->n_blocks; i++) {
        if (placement->kinds[i] == PLACEMENT_DEVICE)
            placement->device_bytes += weights->blocks[i].bytes;
        else if (placement->kinds[i] == PLACEMENT_IN_PLACE && (i != WEIGHTS_BLOCK_EMBEDDING || weights_tied(weights)))
            placement->in_place_bytes += weights->blocks[i].bytes;
    }
    placement->device_bytes += placement->head_rows / WEIGHT_TILE_ROWS * output->tile_bytes;
    placement->streamed_head_bytes = 0;
    for (uint32_t i = 0; i < placement->n_parts; i++) {
        uint64_t bytes = placement->parts[i].streamed ? placement->parts[i].bytes : 0;

        placement->streamed_bytes += bytes;
        placement->streamed_head_bytes += placement->parts[i].block == output->block ? bytes : 0;
    }
    placement->staging_bytes = placement->n_slots * placement->slot_bytes + placement->window_bytes;
}

static int choose(Choice *choice, ErrorDetail *reterr)
{
    const Weights *weights = choice->weights;
    uint64_t norms = weights->blocks[WEIGHTS_BLOCK_NORMS].bytes, budget = choice->limits->budget_bytes, least;
    bool fits = false;
    int r;

    choice->part_bytes = UINT64_MAX;
    if (all_fits(choice))
        return make_parts(choice); /* PLACEMENT_DEVICE is zero */
    choice->available = budget > norms ? budget - norms : 0;
    choose_embedding(choice);
    choose_window(choice);
    r = budget >= norms ? try_without_ring(choice, &fits) : 0;
    if (!r && !fits)
        r = try_all(choice, &fits);
    if (r || fits)
        return r;
    least = norms + least_part_bytes(weights) + weights->embedding.tile_bytes;
    return error_detail_set(reterr, MODEL_E_DEVICE_MEMORY,
                            "%llu bytes of the device are left for weights; they need %llu to stay there, and %llu to stream through it",
                            (unsigned long long)budget, (unsigned long long)weights_total_bytes(weights), (unsigned long long)least);
}

int placement_make(const Weights *weights, const PlacementLimits *limits, Placement *ret, ErrorDetail *reterr)
{
    Placement placement = PLACEMENT_NULL;
    Choice choice = {.weights = weights, .limits = limits, .placement = &placement};
    int r;

    placement.kinds = calloc(weights->n_blocks, sizeof(*placement.kinds));
    placement.span_parts = calloc(weights_n_spans(weights) + 1, sizeof(*placement.span_parts));
    r = placement.kinds && placement.span_parts ? choose(&choice, reterr) : error_origin(-ENOMEM);
    if (r) {
        placement_clear(&placement);
        return error_trace(r);
    }
    sum_up(weights, &placement);
    *ret = placement;
    return 0;
}
