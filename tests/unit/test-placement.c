/* SPDX-License-Identifier: Apache-2.0 */
/* Where weights stay and how the rest is cut: for every budget, ring and limit every row is multiplied once, and nothing exceeds the budget. */

#include "daemon/model/model-private.h"
#include "tests/lib/oracle.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static const char *const fixtures[] = {"tiny-llama-tied.gguf", "tiny-llama-mixed.gguf"};

static ModelFile *open_fixture(const char *name)
{
    ModelFile *file = NULL;
    char path[4096];

    (void)snprintf(path, sizeof(path), "%s/%s", test_data_folder(), name);
    assert_int_equal(model_file_open(path, NULL, &file, NULL), 0);
    return file;
}

static PlacementLimits limits_of(uint64_t budget)
{
    return (PlacementLimits){
        .budget_bytes = budget, .max_allocation_bytes = UINT64_MAX, .max_layers = UINT32_MAX, .n_slots = 2, .max_rows = 64};
}

/* ---- one placement ---------------------------------------------------------------------------------------------------------- */

/* Marks the rows of a slice as columns of its product; none twice. */
static void mark(const PlacementPiece *piece, uint8_t *columns, uint32_t n_columns)
{
    uint32_t column = piece->y_first;

    for (uint32_t s = 0; s < piece->n_slices; s++) {
        const PlacementSlice *slice = &piece->slices[s];

        if (piece->use == PLACEMENT_GATED)
            column = piece->y_first;
        for (uint32_t row = 0; row < slice->n_rows; row++, column++) {
            assert_true(column < n_columns);
            columns[column]++;
        }
        assert_int_equal(slice->to % 64, 0);
        assert_int_equal((slice->from - slice->matrix->offset) % slice->matrix->tile_bytes, 0);
        assert_true(slice->from + slice->bytes <= slice->matrix->offset + (slice->matrix->n_rows + 15u) / 16 * slice->matrix->tile_bytes);
    }
}

/* Every column of the product @use of @layer once (gate and up: twice), by the parts [first, end), in order of the graph. */
static void check_product(const Weights *weights, const Placement *placement, uint32_t first, uint32_t end, PlacementUse use, uint32_t layer)
{
    const WeightsMatrix *tensors = weights->layers[layer].tensors;
    const uint32_t n_columns[] = {
        [PLACEMENT_O] = tensors[WEIGHTS_O].n_rows,
        [PLACEMENT_GATED] = tensors[WEIGHTS_GATE].n_rows,
        [PLACEMENT_DOWN] = tensors[WEIGHTS_DOWN].n_rows,
        [PLACEMENT_QKV] = tensors[WEIGHTS_Q].n_rows + tensors[WEIGHTS_K].n_rows + tensors[WEIGHTS_V].n_rows,
        [PLACEMENT_HEAD] = weights->output.n_rows,
    };
    uint8_t columns[4096] = {0};

    assert_true(n_columns[use] <= sizeof(columns));
    for (uint32_t p = first; p < end; p++)
        for (uint32_t i = 0; i < placement->parts[p].n_pieces; i++) {
            const PlacementPiece *piece = &placement->pieces[placement->parts[p].first_piece + i];

            if (piece->use == use && piece->layer == layer)
                mark(piece, columns, n_columns[use]);
        }
    for (uint32_t c = 0; c < n_columns[use]; c++)
        assert_int_equal(columns[c], use == PLACEMENT_GATED ? 2 : 1);
}

static void check_order(const Placement *placement, uint32_t first, uint32_t end)
{
    PlacementUse last = PLACEMENT_O;

    for (uint32_t p = first; p < end; p++)
        for (uint32_t i = 0; i < placement->parts[p].n_pieces; i++) {
            const PlacementPiece *piece = &placement->pieces[placement->parts[p].first_piece + i];

            assert_true(piece->use >= last);
            last = piece->use;
        }
}

static void check_parts(const Weights *weights, const Placement *placement)
{
    uint32_t n_spans = weights_n_spans(weights);

    for (uint32_t s = 0; s < n_spans; s++) {
        uint32_t first = placement->span_parts[s], end = placement->span_parts[s + 1];

        assert_true(first < end);
        check_order(placement, first, end);
        for (PlacementUse use = PLACEMENT_O; use <= PLACEMENT_DOWN && s > 0; use++)
            check_product(weights, placement, first, end, use, s - 1);
        if (s < weights->n_layers)
            check_product(weights, placement, first, end, PLACEMENT_QKV, s);
    }
    check_product(weights, placement, placement->span_parts[n_spans], placement->n_parts, PLACEMENT_HEAD, 0);
    for (uint32_t p = 0; p < placement->n_parts; p++) {
        const PlacementPart *part = &placement->parts[p];

        assert_true(part->n_pieces >= 1 && part->n_pieces <= 4);
        if (part->streamed)
            assert_true(part->bytes <= placement->slot_bytes);
    }
}

static void check_placement(const Weights *weights, const Placement *placement, const PlacementLimits *limits)
{
    uint64_t device = 0, largest = 0;
    uint32_t n_streamed = 0, n_resident = 0;

    for (uint32_t i = 0; i < weights->n_blocks; i++)
        device += placement->kinds[i] == PLACEMENT_DEVICE ? weights->blocks[i].bytes : 0;
    device += placement->head_rows / WEIGHT_TILE_ROWS * weights->output.tile_bytes;
    for (uint32_t p = 0; p < placement->n_parts; p++)
        if (placement->parts[p].streamed) {
            largest = MAX(largest, placement->parts[p].bytes);
            n_streamed++;
        }
    for (uint32_t s = 0; s < weights_n_spans(weights); s++)
        n_resident += placement->kinds[WEIGHTS_BLOCK_SPANS + s] == PLACEMENT_DEVICE;
    assert_int_equal(placement->device_bytes, device);
    assert_int_equal(placement->slot_bytes, largest);
    assert_int_equal(placement->staging_bytes, placement->n_slots * placement->slot_bytes + placement->window_bytes);
    assert_true(placement->device_bytes + placement->staging_bytes <= limits->budget_bytes);
    assert_true(placement->n_slots <= limits->n_slots && placement->n_slots <= n_streamed);
    assert_true((placement->n_slots > 0) == (n_streamed > 0));
    assert_int_equal(placement->window_rows > 0, placement->kinds[WEIGHTS_BLOCK_EMBEDDING] == PLACEMENT_ROWS);
    assert_int_equal(placement->kinds[WEIGHTS_BLOCK_NORMS], PLACEMENT_DEVICE);
    if (limits->max_layers < weights->n_layers)
        assert_true(n_resident <= limits->max_layers);
    check_parts(weights, placement);
}

/* ---- many ------------------------------------------------------------------------------------------------------------------- */

static void every_budget_multiplies_every_row_once_and_is_kept(void **state)
{
    (void)state;
    for (size_t f = 0; f < N_ELEMENTS(fixtures); f++) {
        _cleanup_(model_file_freep) ModelFile *file = open_fixture(fixtures[f]);
        const Weights *weights = &file->weights;
        uint64_t all = weights_total_bytes(weights);
        uint32_t n_refused = 0, n_made = 0;

        for (uint32_t slots = 1; slots <= 8; slots++)
            for (uint64_t budget = all / 64; budget <= all + 1000; budget += all / 97) {
                PlacementLimits limits = limits_of(budget);
                Placement placement = PLACEMENT_NULL;
                int r;

                limits.n_slots = slots;
                r = placement_make(weights, &limits, &placement, NULL);
                if (r) {
                    assert_int_equal(r, MODEL_E_DEVICE_MEMORY);
                    n_refused++;
                    continue;
                }
                n_made++;
                check_placement(weights, &placement, &limits);
                placement_clear(&placement);
            }
        print_message("%s: %u budgets served, %u refused\n", fixtures[f], n_made, n_refused);
        assert_true(n_made > 600);
        assert_true(n_refused > 0);
    }
}

static void more_budget_never_streams_more_by_much(void **state)
{
    (void)state;
    for (size_t f = 0; f < N_ELEMENTS(fixtures); f++) {
        _cleanup_(model_file_freep) ModelFile *file = open_fixture(fixtures[f]);
        uint64_t all = weights_total_bytes(&file->weights), before = UINT64_MAX;

        for (uint64_t percent = 25; percent <= 100; percent++) {
            PlacementLimits limits = limits_of(all * percent / 100);
            Placement placement = PLACEMENT_NULL;

            assert_int_equal(placement_make(&file->weights, &limits, &placement, NULL), 0);
            /* Slots grow with the budget, so a little may be lost to them. */
            assert_true(placement.streamed_bytes <= (before == UINT64_MAX ? all : before + all / 8));
            before = placement.streamed_bytes;
            placement_clear(&placement);
        }
        assert_int_equal(before, 0);
    }
}

/* Streamed parts of the head in a row, at most; parts of it that stay. */
static uint32_t longest_run(const Placement *placement, uint32_t first, uint32_t *ret_n_stay, uint32_t *ret_n_streamed)
{
    uint32_t run = 0, longest = 0;

    *ret_n_stay = *ret_n_streamed = 0;
    for (uint32_t p = first; p < placement->n_parts; p++) {
        run = placement->parts[p].streamed ? run + 1 : 0;
        longest = MAX(longest, run);
        *ret_n_stay += !placement->parts[p].streamed;
        *ret_n_streamed += placement->parts[p].streamed;
    }
    return longest;
}

static void spans_and_head_keep_the_same_share_and_what_stays_is_spread(void **state)
{
    uint32_t n_checked = 0;

    (void)state;
    for (size_t f = 0; f < N_ELEMENTS(fixtures); f++) {
        _cleanup_(model_file_freep) ModelFile *file = open_fixture(fixtures[f]);
        const Weights *weights = &file->weights;
        uint32_t n_spans = weights_n_spans(weights), n_stay, n_streamed;
        uint64_t all = weights_total_bytes(weights), head = weights->blocks[weights->output.block].bytes;

        for (uint64_t percent = 20; percent < 100; percent++) {
            PlacementLimits limits = limits_of(all * percent / 100);
            uint64_t spans = 0, largest = 0, stay = 0, head_stay;
            Placement placement = PLACEMENT_NULL;

            limits.n_slots = 8; /* small parts, so that the head has many */
            assert_int_equal(placement_make(weights, &limits, &placement, NULL), 0);
            for (uint32_t s = 0; s < n_spans; s++) {
                uint64_t bytes = weights->blocks[WEIGHTS_BLOCK_SPANS + s].bytes;

                spans += bytes;
                largest = MAX(largest, bytes);
                stay += placement.kinds[WEIGHTS_BLOCK_SPANS + s] == PLACEMENT_DEVICE ? bytes : 0;
            }
            head_stay = placement.head_rows / WEIGHT_TILE_ROWS * weights->output.tile_bytes;
            if (placement.kinds[weights->output.block] != PLACEMENT_DEVICE) {
                uint32_t run = longest_run(&placement, placement.span_parts[n_spans], &n_stay, &n_streamed);
                /* To a tile below its share; above it by what is too little for another span. */
                double due = (double)(stay + head_stay) / (double)(spans + head) * (double)head;

                assert_true((double)head_stay + 2.0 * (double)weights->output.tile_bytes >= due);
                assert_true((double)head_stay <= due + (double)largest);
                assert_true(run <= (n_streamed + MAX(n_stay, 1u) - 1) / MAX(n_stay, 1u));
                n_checked += n_stay > 1;
            }
            placement_clear(&placement);
        }
    }
    print_message("%u heads in more than one turn\n", n_checked);
    assert_true(n_checked > 30);
}

static void a_device_that_shares_memory_streams_nothing(void **state)
{
    (void)state;
    for (size_t f = 0; f < N_ELEMENTS(fixtures); f++) {
        _cleanup_(model_file_freep) ModelFile *file = open_fixture(fixtures[f]);
        uint64_t all = weights_total_bytes(&file->weights);
        PlacementLimits limits = limits_of(all / 3);
        Placement placement = PLACEMENT_NULL;

        limits.in_place = true;
        assert_int_equal(placement_make(&file->weights, &limits, &placement, NULL), 0);
        check_placement(&file->weights, &placement, &limits);
        assert_int_equal(placement.n_slots, 0);
        assert_int_equal(placement.window_rows, 0);
        assert_true(placement.in_place_bytes > 0);
        placement_clear(&placement);
        /* A block that is larger than the device's largest buffer streams all the same. */
        limits.max_allocation_bytes = file->weights.blocks[file->weights.output.block].bytes - 1;
        assert_int_equal(placement_make(&file->weights, &limits, &placement, NULL), 0);
        check_placement(&file->weights, &placement, &limits);
        assert_true(placement.n_slots > 0);
        placement_clear(&placement);
    }
}

static void a_limit_of_layers_is_kept_whatever_fits(void **state)
{
    (void)state;
    for (size_t f = 0; f < N_ELEMENTS(fixtures); f++) {
        _cleanup_(model_file_freep) ModelFile *file = open_fixture(fixtures[f]);

        for (uint32_t n = 0; n <= file->weights.n_layers; n++) {
            PlacementLimits limits = limits_of(UINT64_MAX);
            Placement placement = PLACEMENT_NULL;

            limits.max_layers = n;
            assert_int_equal(placement_make(&file->weights, &limits, &placement, NULL), 0);
            check_placement(&file->weights, &placement, &limits);
            assert_int_equal(placement.streamed_bytes > 0, n < file->weights.n_layers);
            placement_clear(&placement);
        }
    }
}

static void what_cannot_even_stream_is_refused_with_numbers(void **state)
{
    _cleanup_(model_file_freep) ModelFile *file = open_fixture(fixtures[0]);
    PlacementLimits limits = limits_of(2000);
    Placement placement = PLACEMENT_NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;

    (void)state;
    assert_int_equal(placement_make(&file->weights, &limits, &placement, &detail), MODEL_E_DEVICE_MEMORY);
    assert_non_null(strstr(detail.text, "2000 bytes of the device"));
    assert_null(placement.kinds);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_budget_multiplies_every_row_once_and_is_kept),
        cmocka_unit_test(more_budget_never_streams_more_by_much),
        cmocka_unit_test(spans_and_head_keep_the_same_share_and_what_stays_is_spread),
        cmocka_unit_test(a_device_that_shares_memory_streams_nothing),
        cmocka_unit_test(a_limit_of_layers_is_kept_whatever_fits),
        cmocka_unit_test(what_cannot_even_stream_is_refused_with_numbers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
