/* SPDX-License-Identifier: Apache-2.0 */
/* Automatic bits: the search on given numbers, and what is kept of them. */

#include "daemon/model/nbits-private.h"
#include "tests/lib/place.h"

#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static const KvShape shape = {.n_heads = 9, .n_kv_heads = 3, .k_head_dim = 64, .v_head_dim = 64, .rotary_dim = 64};

static KvForm auto_form(KvFormKind kind)
{
    KvForm form = kv_form_default(kind);

    form.k_bits = form.v_bits = KV_BITS_AUTO;
    return form;
}

static NbitsTable new_table(KvForm form)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    NbitsTable table;

    if (nbits_table_init(&table, form, &shape, &detail))
        fail_msg("%s", detail.text);
    return table;
}

static NbitsEntry *entry_of(NbitsTable *table, uint32_t k_bits, uint32_t v_bits)
{
    uint32_t i = 0;

    while (i + 1 < table->n && (table->entries[i].k_bits != k_bits || table->entries[i].v_bits != v_bits))
        i++;
    assert_int_equal(table->entries[i].k_bits, k_bits);
    assert_int_equal(table->entries[i].v_bits, v_bits);
    return &table->entries[i];
}

/* A model: what K and V cost with b bits is four times less with each bit. */
static double kld_of(const NbitsEntry *entry, double k_cost, double v_cost)
{
    return k_cost / (double)(1u << 2 * entry->k_bits) + v_cost / (double)(1u << 2 * entry->v_bits);
}

/* Runs the search; returns how many it measured. */
static uint32_t search(NbitsTable *table, double budget, double k_cost, double v_cost)
{
    uint32_t index, n = 0;

    while (nbits_next(table, budget, &index)) {
        NbitsEntry *entry = &table->entries[index];

        assert_int_equal(entry->state, NBITS_OPEN);
        assert_int_equal(nbits_choice(table, budget), NBITS_NO_CHOICE);
        entry->state = NBITS_MEASURED;
        entry->kld = kld_of(entry, k_cost, v_cost);
        assert_true(++n <= table->n);
    }
    return n;
}

/* ---- candidates --------------------------------------------------------------------------------------------------------------- */

static void candidates_are_all_bits_that_the_form_allows_the_cheapest_first(void **state)
{
    NbitsTable table = new_table(auto_form(KV_FORM_LEAT));

    (void)state;
    assert_int_equal(table.n, 36);
    assert_int_equal(table.entries[0].k_bits, 2);
    assert_int_equal(table.entries[0].v_bits, 2);
    assert_int_equal(table.entries[35].k_bits, 8);
    assert_int_equal(table.entries[35].v_bits, 8);
    for (uint32_t i = 1; i < table.n; i++) {
        assert_true(table.entries[i].true_bits >= table.entries[i - 1].true_bits);
        assert_int_equal(table.entries[i].state, NBITS_OPEN);
    }
    assert_true(entry_of(&table, 5, 4)->true_bits > 4.8 && entry_of(&table, 5, 4)->true_bits < 4.9);
    assert_int_equal(new_table(auto_form(KV_FORM_HQQ)).n, 9);
    assert_int_equal(new_table(auto_form(KV_FORM_QUANTO)).n, 4);
}

static void a_side_that_is_given_stays(void **state)
{
    KvForm form = auto_form(KV_FORM_LEAT);
    NbitsTable table;

    (void)state;
    form.k_bits = 6;
    table = new_table(form);
    assert_int_equal(table.n, 6);
    for (uint32_t i = 0; i < table.n; i++)
        assert_int_equal(table.entries[i].k_bits, 6);
    assert_true(search(&table, 0.002, 1, 1) <= 3);
    assert_int_equal(table.entries[nbits_choice(&table, 0.002)].v_bits, 5);
}

static void a_form_without_a_choice_needs_no_measurement(void **state)
{
    NbitsTable table = new_table(auto_form(KV_FORM_FP8));
    ErrorDetail detail = ERROR_DETAIL_NULL;
    uint32_t index;

    (void)state;
    assert_false(nbits_next(&table, 0.002, &index));
    assert_int_equal(nbits_choice(&table, 0.002), 0);
    assert_int_equal(nbits_table_init(&table, kv_form_default(KV_FORM_F16), &shape, &detail), -EINVAL);
    assert_non_null(strstr(detail.text, "f16"));
}

static void a_shape_that_pages_refuse_says_why(void **state)
{
    KvShape odd = shape;
    NbitsTable table;
    uint32_t index;

    (void)state;
    odd.k_head_dim = odd.v_head_dim = 24;
    odd.rotary_dim = 24;
    assert_int_equal(nbits_table_init(&table, auto_form(KV_FORM_LEAT), &odd, NULL), 0);
    assert_int_equal(table.n, 36);
    assert_int_equal(table.entries[3].state, NBITS_REFUSED);
    assert_non_null(strstr(table.entries[3].reason, "head_dim"));
    assert_false(nbits_next(&table, 0.002, &index));
    assert_int_equal(nbits_choice(&table, 0.002), NBITS_NO_CHOICE);
}

/* ---- the search --------------------------------------------------------------------------------------------------------------- */

static void the_search_finds_the_cheapest_within_the_budget(void **state)
{
    uint32_t seed = 20261129, most = 0, all = 0, n_rounds = 2000;

    (void)state;
    print_message("seed %u\n", seed);
    for (uint32_t round = 0; round < n_rounds; round++) {
        NbitsTable table = new_table(auto_form(KV_FORM_LEAT));
        double costs[2], best = 99;
        uint32_t n, choice;

        for (int i = 0; i < 2; i++) {
            seed = seed * 1664525 + 1013904223;
            costs[i] = (double)(1u << (seed >> 28)) * (1 + (double)(seed >> 8 & 255) / 256) / 1000;
        }
        n = search(&table, 0.002, costs[0], costs[1]);
        most = MAX(most, n);
        all += n;
        choice = nbits_choice(&table, 0.002);
        assert_int_not_equal(choice, NBITS_NO_CHOICE);
        for (uint32_t i = 0; i < table.n; i++)
            if (kld_of(&table.entries[i], costs[0], costs[1]) <= 0.002)
                best = MIN(best, table.entries[i].true_bits);
        if (best < 99)
            assert_true(table.entries[choice].kld <= 0.002 && table.entries[choice].true_bits <= best);
        else
            assert_int_equal(choice, table.n - 1);
    }
    print_message("measured %.1f of 36 on average, %u at most\n", (double)all / n_rounds, most);
    assert_true(most <= 8);
}

static void a_refused_candidate_is_left_out(void **state)
{
    NbitsTable table = new_table(auto_form(KV_FORM_LEAT)), refused = table;

    (void)state;
    (void)search(&table, 0.002, 1.5, 0.3);
    assert_int_equal(table.entries[nbits_choice(&table, 0.002)].k_bits, 5);
    assert_int_equal(table.entries[nbits_choice(&table, 0.002)].v_bits, 5);
    entry_of(&refused, 5, 5)->state = NBITS_REFUSED;
    (void)search(&refused, 0.002, 1.5, 0.3);
    assert_int_equal(refused.entries[nbits_choice(&refused, 0.002)].k_bits, 6);
    assert_int_equal(refused.entries[nbits_choice(&refused, 0.002)].v_bits, 4);
}

static void when_nothing_is_within_the_budget_the_most_bits_are_taken(void **state)
{
    NbitsTable table = new_table(auto_form(KV_FORM_LEAT));

    (void)state;
    (void)search(&table, 0.002, 1e6, 1e6);
    assert_int_equal(nbits_choice(&table, 0.002), table.n - 1);
    table = new_table(auto_form(KV_FORM_LEAT));
    entry_of(&table, 8, 8)->state = NBITS_REFUSED;
    (void)search(&table, 0.002, 1e6, 1e6);
    assert_int_equal(nbits_choice(&table, 0.002), table.n - 2);
}

/* ---- what is kept -------------------------------------------------------------------------------------------------------------- */

typedef struct State {
    char folder[TEST_FOLDER_SIZE];
    ModelFile file;
} State;

static int setup(void **state)
{
    State *s = calloc(1, sizeof(*s));

    if (!s)
        return -1;
    if (test_folder_new(s->folder))
        return -1;
    s->file.state_dir = s->folder;
    s->file.hparams.model.attention = shape;
    memset(s->file.digest_hex, 'a', sizeof(s->file.digest_hex) - 1);
    *state = s;
    return 0;
}

static int teardown(void **state)
{
    State *s = *state;

    (void)test_folder_remove(s->folder);
    free(s->file.nbits);
    free(s);
    return 0;
}

static KvPolicy auto_policy(void)
{
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false);

    policy.form = auto_form(KV_FORM_LEAT);
    return policy;
}

/* Measures what is missing and keeps it, as a model would; returns how many that were. */
static uint32_t measure(State *s, const KvPolicy *policy, bool exact)
{
    NbitsTable table;
    NbitsKept kept;
    uint32_t n;

    assert_int_equal(nbits_load(&s->file, exact, policy, &kept, &table, NULL), 0);
    n = search(&table, policy->kld_budget, 1, 0.25);
    nbits_keep(&s->file, &kept, &table);
    return n;
}

/* As another start of the daemon finds it: nothing in memory. */
static void restart(State *s)
{
    free(s->file.nbits);
    s->file.nbits = NULL;
}

static void what_was_measured_is_not_measured_again(void **state)
{
    State *s = *state;
    KvPolicy policy = auto_policy(), resolved;
    bool known = true;

    resolved = model_nbits_resolve(&s->file, false, &policy, &known);
    assert_false(known);
    assert_int_equal(resolved.form.k_bits, kv_form_default(KV_FORM_LEAT).k_bits);
    assert_true(measure(s, &policy, false) > 0);
    for (int i = 0; i < 2; i++) {
        resolved = model_nbits_resolve(&s->file, false, &policy, &known);
        assert_true(known);
        assert_int_equal(resolved.form.k_bits, 5);
        assert_int_equal(resolved.form.v_bits, 4);
        assert_int_equal(measure(s, &policy, false), 0);
        restart(s);
    }
}

static void without_a_state_directory_it_is_kept_as_long_as_the_file_is_open(void **state)
{
    State *s = *state;
    KvPolicy policy = auto_policy();

    s->file.state_dir = NULL;
    assert_true(measure(s, &policy, false) > 0);
    assert_int_equal(measure(s, &policy, false), 0);
    restart(s);
    assert_true(measure(s, &policy, false) > 0);
}

static void another_model_recipe_or_compute_mode_is_measured_anew(void **state)
{
    State *s = *state;
    KvPolicy policy = auto_policy(), other = policy;

    assert_true(measure(s, &policy, false) > 0);
    assert_true(measure(s, &policy, true) > 0);
    other.form.rotation = KV_ROTATION_NONE;
    assert_true(measure(s, &other, false) > 0);
    other = policy;
    other.form.sink_tokens = 0;
    assert_true(measure(s, &other, false) > 0);
    assert_int_equal(measure(s, &other, false), 0);
    s->file.digest_hex[3] = 'b';
    restart(s);
    assert_true(measure(s, &policy, false) > 0);
    s->file.digest_hex[3] = 'a';
    restart(s);
    assert_int_equal(measure(s, &policy, false), 0);
}

static void another_budget_measures_only_what_it_needs_beyond(void **state)
{
    State *s = *state;
    KvPolicy policy = auto_policy();
    uint32_t first, second;
    bool known;

    first = measure(s, &policy, false);
    policy.kld_budget = 0.02;
    restart(s);
    second = measure(s, &policy, false);
    print_message("first %u, then %u\n", first, second);
    assert_true(second > 0 && second < first);
    policy = model_nbits_resolve(&s->file, false, &policy, &known);
    assert_true(known);
    assert_int_equal(policy.form.k_bits, 3);
    assert_int_equal(policy.form.v_bits, 3);
}

static void find_file(const State *s, char ret[static 256])
{
    const KvPolicy policy = auto_policy();
    NbitsKept kept;
    NbitsTable table;
    uint64_t hash = 0xcbf29ce484222325u;

    assert_int_equal(nbits_load(&s->file, false, &policy, &kept, &table, NULL), 0);
    for (const char *c = kept.recipe; *c; c++)
        hash = (hash ^ (uint8_t)*c) * 0x100000001b3u;
    (void)snprintf(ret, 256, "%s/bits/%s-%016llx", s->folder, s->file.digest_hex, (unsigned long long)hash);
}

static void a_damaged_file_is_measured_again(void **state)
{
    State *s = *state;
    KvPolicy policy = auto_policy();
    char path[256];
    uint32_t n = measure(s, &policy, false);

    find_file(s, path);
    for (int damage = 0; damage < 3; damage++) {
        int fd = open(path, O_RDWR | O_CLOEXEC);
        uint8_t byte;

        assert_true(fd >= 0);
        if (damage == 0) {
            assert_int_equal(pread(fd, &byte, 1, 200), 1);
            byte ^= 1;
            assert_int_equal(pwrite(fd, &byte, 1, 200), 1);
        } else {
            assert_int_equal(ftruncate(fd, damage == 1 ? 100 : 0), 0);
        }
        (void)close(fd);
        restart(s);
        assert_int_equal(measure(s, &policy, false), n);
        restart(s);
        assert_int_equal(measure(s, &policy, false), 0);
    }
}

static void a_file_with_impossible_numbers_is_measured_again(void **state)
{
    static const float wrong[] = {-0.5f, -3.0f, (float)INFINITY, (float)NAN};
    State *s = *state;
    KvPolicy policy = auto_policy();

    for (size_t i = 0; i < N_ELEMENTS(wrong); i++) {
        const StateKind kind = {"bits", {'L', 'E', 'A', 'T', 'B', 'I', 'T', 'S'}, 1};
        NbitsTable table;
        NbitsKept kept;
        char path[256];

        assert_true(measure(s, &policy, false) > 0);
        assert_int_equal(nbits_load(&s->file, false, &policy, &kept, &table, NULL), 0);
        kept.kld[5 * (KV_MAX_BITS + 1) + 4] = wrong[i];
        find_file(s, path);
        assert_int_equal(state_file_write(s->folder, &kind, strrchr(path, '/') + 1, &kept, sizeof(kept)), 0);
        restart(s);
    }
}

/* What was measured without layers of other bits says nothing of those beside them. */
static void bits_beside_other_layers_are_measured_apart(void **state)
{
    State *s = *state;
    KvPolicy policy = auto_policy(), mixed = policy, other;
    bool known;

    mixed.n_layer_bits = 1;
    mixed.layer_bits[0] = (KvLayerBits){0, 1, 8, 8};
    other = mixed;
    other.layer_bits[0].last = 2;
    assert_true(measure(s, &policy, false) > 0);
    (void)model_nbits_resolve(&s->file, false, &mixed, &known);
    assert_false(known);
    assert_true(measure(s, &mixed, false) > 0);
    restart(s);
    assert_int_equal(measure(s, &mixed, false), 0);
    mixed = model_nbits_resolve(&s->file, false, &mixed, &known);
    assert_true(known);
    assert_int_equal(mixed.n_layer_bits, 1); /* they stay as they are */
    assert_int_equal(mixed.layer_bits[0].k_bits, 8);
    (void)model_nbits_resolve(&s->file, false, &other, &known);
    assert_false(known);
    restart(s);
    assert_int_equal(measure(s, &policy, false), 0);
}

/* Two of ten layers with 8 and 8 bits: a fifth of what those cost, and four fifths of the candidate. */
static void true_bits_are_the_mean_of_all_layers(void **state)
{
    State *s = *state;
    KvPolicy policy = auto_policy(), mixed = policy;
    uint32_t n_layers = s->file.hparams.model.n_layers;
    NbitsTable plain, table;
    double eight;

    s->file.hparams.model.n_layers = 10;
    mixed.n_layer_bits = 1;
    mixed.layer_bits[0] = (KvLayerBits){8, 40, 8, 8}; /* those beyond the last one count nothing */
    assert_int_equal(model_nbits_table(&s->file, false, &policy, &plain, NULL), 0);
    assert_int_equal(model_nbits_table(&s->file, false, &mixed, &table, NULL), 0);
    assert_int_equal(table.n, plain.n);
    eight = entry_of(&plain, 8, 8)->true_bits;
    for (uint32_t i = 0; i < table.n; i++) {
        assert_int_equal(table.entries[i].k_bits, plain.entries[i].k_bits);
        assert_true(fabs(table.entries[i].true_bits - (0.2 * eight + 0.8 * plain.entries[i].true_bits)) < 1e-9);
    }
    s->file.hparams.model.n_layers = n_layers;
}

static void a_choice_of_explicit_bits_is_left_alone(void **state)
{
    State *s = *state;
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false), resolved;
    bool known = false;

    resolved = model_nbits_resolve(&s->file, false, &policy, &known);
    assert_true(known);
    assert_true(kv_form_equal(&policy.form, &resolved.form));
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(candidates_are_all_bits_that_the_form_allows_the_cheapest_first),
        cmocka_unit_test(a_side_that_is_given_stays),
        cmocka_unit_test(a_form_without_a_choice_needs_no_measurement),
        cmocka_unit_test(a_shape_that_pages_refuse_says_why),
        cmocka_unit_test(the_search_finds_the_cheapest_within_the_budget),
        cmocka_unit_test(a_refused_candidate_is_left_out),
        cmocka_unit_test(when_nothing_is_within_the_budget_the_most_bits_are_taken),
        cmocka_unit_test_setup_teardown(what_was_measured_is_not_measured_again, setup, teardown),
        cmocka_unit_test_setup_teardown(without_a_state_directory_it_is_kept_as_long_as_the_file_is_open, setup, teardown),
        cmocka_unit_test_setup_teardown(another_model_recipe_or_compute_mode_is_measured_anew, setup, teardown),
        cmocka_unit_test_setup_teardown(another_budget_measures_only_what_it_needs_beyond, setup, teardown),
        cmocka_unit_test_setup_teardown(a_damaged_file_is_measured_again, setup, teardown),
        cmocka_unit_test_setup_teardown(a_file_with_impossible_numbers_is_measured_again, setup, teardown),
        cmocka_unit_test_setup_teardown(bits_beside_other_layers_are_measured_apart, setup, teardown),
        cmocka_unit_test_setup_teardown(true_bits_are_the_mean_of_all_layers, setup, teardown),
        cmocka_unit_test_setup_teardown(a_choice_of_explicit_bits_is_left_alone, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
