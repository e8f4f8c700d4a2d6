/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compatibility caches and masks against what Transformers did: every line of tests/data/cache-traces.txt (its grammar stands in
 * make-cache-traces.py) is carried out and compared.
 */

#include "cache/kv-compat-mask.h"
#include "tests/lib/compat-rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#define MAX_WORDS 600

typedef struct Line {
    char text[8192];
    char *words[MAX_WORDS];
    uint32_t n_words, n_given; /* words before "=>" */
    uint32_t number;
} Line;

typedef struct Player {
    Rig rig;
    KvCompatLayerSpec layers[RIG_MAX_LAYERS];
    uint32_t kernels[RIG_MAX_LAYERS];
    uint32_t n_layers;
    char name[128];
    uint32_t n_operations, n_masks;
} Player;

static void split(Line *line)
{
    char *rest = NULL;

    line->n_words = 0;
    line->n_given = 0;
    for (char *word = strtok_r(line->text, " \n", &rest); word; word = strtok_r(NULL, " \n", &rest)) {
        assert_true(line->n_words < MAX_WORDS);
        if (strcmp(word, "=>") == 0)
            line->n_given = line->n_words;
        else
            line->words[line->n_words++] = word;
    }
    if (line->n_given == 0)
        line->n_given = line->n_words;
}

static uint32_t given(const Line *line, uint32_t i)
{
    assert_true(i < line->n_given);
    return (uint32_t)strtoul(line->words[i], NULL, 10);
}

/* The words of the line from the one after @key up to @end (NULL: the line's), joined. */
static const char *expected(const Line *line, const char *key, const char *end)
{
    static char joined[8192];
    uint32_t i = line->n_given;

    joined[0] = '\0';
    while (i < line->n_words && strcmp(line->words[i], key) != 0)
        i++;
    assert_true(i < line->n_words);
    for (i++; i < line->n_words && (!end || strcmp(line->words[i], end) != 0); i++) {
        if (joined[0])
            strcat(joined, " ");
        strcat(joined, line->words[i]);
    }
    return joined;
}

static void same(const Player *player, const Line *line, const char *what, const char *got, const char *wanted)
{
    if (strcmp(got, wanted) != 0)
        fail_msg("line %u, case %s: %s is\n  %s\nbut was\n  %s", line->number, player->name, what, got, wanted);
}

static KvCompatKind kind_of(const char *name, bool *ret_linear)
{
    static const struct {
        const char *name;
        KvCompatKind kind;
        bool linear;
    } kinds[] = {
        {"dynamic", KV_COMPAT_DYNAMIC, false},
        {"static", KV_COMPAT_STATIC, false},
        {"sliding", KV_COMPAT_SLIDING, false},
        {"static_sliding", KV_COMPAT_STATIC_SLIDING, false},
        {"conv", KV_COMPAT_DUMMY, true},
        {"hybrid", KV_COMPAT_DYNAMIC, true},
        {"dummy", KV_COMPAT_DUMMY, false},
    };

    for (size_t i = 0; i < N_ELEMENTS(kinds); i++)
        if (strcmp(kinds[i].name, name) == 0) {
            *ret_linear = kinds[i].linear;
            return kinds[i].kind;
        }
    fail_msg("no layer kind %s", name);
    return KV_COMPAT_KIND_X_MAX;
}

static void add_layer(Player *player, const Line *line)
{
    KvCompatLayerSpec *spec = &player->layers[player->n_layers];

    assert_true(player->n_layers < RIG_MAX_LAYERS);
    *spec = (KvCompatLayerSpec){0};
    spec->kind = kind_of(line->words[1], &spec->linear);
    player->kernels[player->n_layers] = 0;
    for (uint32_t i = 2; i + 1 < line->n_given; i += 2) {
        if (strcmp(line->words[i], "window") == 0)
            spec->window = given(line, i + 1);
        else if (strcmp(line->words[i], "max") == 0)
            spec->max_tokens = given(line, i + 1);
        else
            player->kernels[player->n_layers] = given(line, i + 1);
    }
    player->n_layers++;
}

static void begin(Player *player, const Line *line)
{
    rig_deinit(&player->rig);
    rig_init(&player->rig, player->layers, player->n_layers, given(line, 1));
    memcpy(player->rig.kernels, player->kernels, sizeof(player->kernels));
}

static void play_update(Player *player, const Line *line)
{
    uint32_t layer = given(line, 1), q = given(line, 2);
    char number[24];

    same(player, line, "the mask", rig_mask(&player->rig, layer, q), expected(line, "mask", "ret"));
    assert_int_equal(rig_update(&player->rig, layer, q), 0);
    same(player, line, "what is returned", rig_returned(&player->rig), expected(line, "ret", "kept"));
    same(player, line, "what is kept", rig_kept(&player->rig, layer), expected(line, "kept", "len"));
    snprintf(number, sizeof(number), "%u", rig_length(&player->rig, layer));
    same(player, line, "the length", number, expected(line, "len", NULL));
}

static void play_conv(Player *player, const Line *line)
{
    uint32_t layer = given(line, 1);

    assert_int_equal(rig_conv(&player->rig, layer, given(line, 2)), 0);
    same(player, line, "what is returned", rig_returned(&player->rig), expected(line, "ret", "kept"));
    same(player, line, "what is kept", rig_columns(&player->rig, layer), expected(line, "kept", NULL));
}

static void play_rows(Player *player, const Line *line)
{
    uint32_t rows[16], n = line->n_given - 1;
    int r;

    assert_true(n <= N_ELEMENTS(rows));
    for (uint32_t i = 0; i < n; i++)
        rows[i] = given(line, 1 + i);
    if (strcmp(line->words[0], "repeat") == 0) {
        r = kv_compat_repeat(player->rig.cache, rows[0], NULL);
        player->rig.n_rows *= rows[0];
    } else if (strcmp(line->words[0], "select") == 0) {
        r = kv_compat_select(player->rig.cache, rows, n, NULL);
        player->rig.n_rows = n;
    } else {
        r = kv_compat_reorder(player->rig.cache, rows, n, NULL);
    }
    assert_int_equal(r, 0);
}

static void play_lengths(Player *player, const Line *line)
{
    for (uint32_t i = 0; i < player->n_layers; i++) {
        uint64_t length = 0;
        int r = kv_compat_length(player->rig.cache, i, &length, NULL);
        char got[24];

        snprintf(got, sizeof(got), "%lld", r == 0 ? (long long)length : -2);
        same(player, line, "a length", got, line->words[line->n_given + i]);
    }
}

static void play_whole(Player *player, const Line *line)
{
    int64_t longest = -2;
    char got[128], wanted[128];

    (void)kv_compat_max_length_all(player->rig.cache, &longest, NULL);
    snprintf(got, sizeof(got), "%d compileable %d max %lld", kv_compat_is_croppable(player->rig.cache),
             kv_compat_is_fixed(player->rig.cache), (long long)longest);
    snprintf(wanted, sizeof(wanted), "%s", expected(line, "croppable", NULL));
    same(player, line, "the whole", got, wanted);
}

static void play_mask(Player *player, const Line *line)
{
    static const char *const kinds[] = {[KV_MASK_CAUSAL] = "causal", [KV_MASK_SLIDING] = "sliding", [KV_MASK_CHUNKED] = "chunked"};
    uint32_t pads[2] = {given(line, 4), given(line, 5)}, q = given(line, 7), length = given(line, 9), from = given(line, 11);
    uint8_t padding[2][64];
    KvMask mask = {.window = given(line, 2), .padding = &padding[0][0], .n_padding = length + q};

    while (strcmp(kinds[mask.kind], line->words[1]) != 0)
        mask.kind++;
    for (uint32_t b = 0; b < 2; b++)
        for (uint32_t t = 0; t < length + q; t++)
            (&padding[0][0])[b * (length + q) + t] = t >= pads[b];
    for (uint32_t b = 0; b < 2; b++)
        for (uint32_t i = 0; i < q; i++) {
            const char *wanted = line->words[line->n_given + b * q + i];
            char got[64];
            uint32_t j = 0;

            for (; wanted[j]; j++)
                got[j] = kv_mask_sees(&mask, b, length + i, from + j) ? '1' : '.';
            got[j] = '\0';
            same(player, line, "a mask", got, wanted);
        }
    player->n_masks++;
}

static void play(Player *player, const Line *line)
{
    const char *verb = line->words[0];

    player->n_operations++;
    if (strcmp(verb, "case") == 0) {
        player->n_layers = 0;
        snprintf(player->name, sizeof(player->name), "%s %s", line->words[1], line->n_words > 2 ? line->words[2] : "");
    } else if (strcmp(verb, "layer") == 0) {
        add_layer(player, line);
    } else if (strcmp(verb, "rows") == 0) {
        begin(player, line);
    } else if (strcmp(verb, "record") == 0) {
        kv_compat_record(player->rig.cache);
    } else if (strcmp(verb, "update") == 0) {
        play_update(player, line);
    } else if (strcmp(verb, "conv") == 0) {
        play_conv(player, line);
    } else if (strcmp(verb, "state") == 0) {
        assert_int_equal(rig_state(&player->rig, given(line, 1), 1, 1), 0);
        same(player, line, "the state", rig_recurrent(&player->rig, given(line, 1)), expected(line, "value", NULL));
    } else if (strcmp(verb, "crop") == 0) {
        int r = kv_compat_crop(player->rig.cache, strtol(line->words[1], NULL, 10), NULL);

        same(player, line, "the crop", r == 0 ? "done" : "an error", line->n_words > line->n_given ? "an error" : "done");
    } else if (strcmp(verb, "reset") == 0) {
        kv_compat_reset(player->rig.cache);
    } else if (strcmp(verb, "lengths") == 0) {
        play_lengths(player, line);
    } else if (strcmp(verb, "whole") == 0) {
        play_whole(player, line);
    } else if (strcmp(verb, "mask") == 0) {
        play_mask(player, line);
    } else {
        play_rows(player, line);
    }
}

static void layers_and_masks_do_what_the_library_did(void **state)
{
    const char *folder = getenv("LEAT_TEST_DATA");
    _cleanup_(freep) Player *player = calloc(1, sizeof(*player));
    _cleanup_(freep) Line *line = calloc(1, sizeof(*line));
    char path[512];
    FILE *file;

    (void)state;
    assert_non_null(player);
    assert_non_null(line);
    snprintf(path, sizeof(path), "%s/cache-traces.txt", folder ? folder : "tests/data");
    file = fopen(path, "r");
    assert_non_null(file);
    while (fgets(line->text, sizeof(line->text), file)) {
        line->number++;
        assert_non_null(strchr(line->text, '\n'));
        if (line->text[0] == '#' || line->text[0] == '\n')
            continue;
        split(line);
        play(player, line);
    }
    fclose(file);
    rig_deinit(&player->rig);
    printf("%u operations, %u of them masks\n", player->n_operations, player->n_masks);
    assert_true(player->n_operations > 400 && player->n_masks > 30);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_and_masks_do_what_the_library_did),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
