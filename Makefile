# SPDX-License-Identifier: Apache-2.0
# leat: an inference daemon for machines with a small GPU.  `make help` lists the targets.

VERSION       := 0.1.0
BUILD         ?= build
PREFIX        ?= /usr
SYSCONFDIR    ?= /etc
LOCALSTATEDIR ?= /var
DESTDIR       ?=
SANITIZE      ?=
DEVELOPER     ?= 1
V             ?= 0

CC         ?= cc
PKG_CONFIG ?= pkg-config

# Builds with another compiler, sanitizer or flags go to a folder of their own, so that objects never mix.
ifneq ($(SANITIZE),)
BUILD := $(BUILD)/sanitize-$(subst $(,),-,$(subst $() ,-,$(subst ;,-,$(subst :,-,$(SANITIZE)))))
endif

PACKAGES := OpenCL yaml-0.1 libsystemd libpcre2-8 jansson libcrypto

STD  := -std=gnu11 -D_GNU_SOURCE -DCL_TARGET_OPENCL_VERSION=120 -DLEAT_VERSION='"$(VERSION)"' \
        -DLEAT_SYSCONFDIR='"$(SYSCONFDIR)"' -DLEAT_PREFIX='"$(PREFIX)"' -DLEAT_LOCALSTATEDIR='"$(LOCALSTATEDIR)"'
WARN := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wcast-qual -Wundef \
        -Wwrite-strings -Wvla -Wformat=2 -Wnull-dereference -Wimplicit-fallthrough
ifeq ($(DEVELOPER),1)
WARN += -Werror
endif
OPT  := -O2 -g -fno-strict-aliasing -ffp-contract=off
SAN  := $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-omit-frame-pointer)

ALL_CFLAGS  = $(STD) $(WARN) $(OPT) $(SAN) -I. $(shell $(PKG_CONFIG) --cflags $(PACKAGES)) $(CFLAGS)
ALL_LDFLAGS = $(SAN) $(LDFLAGS)
LIBS        = $(shell $(PKG_CONFIG) --libs $(PACKAGES)) -lclblast -lm -lpthread

ifeq ($(V),0)
Q := @
say = @printf '  %-7s %s\n' $(1) $(2)
else
Q :=
say = @:
endif

# ---- sources, by layer --------------------------------------------------------------------------------------------------

QUANT_SRC  := $(sort $(wildcard quant/base/*.c quant/*.c))
OPENCL_SRC := $(sort $(wildcard opencl/*.c))
KERNELS    := $(sort $(wildcard opencl/kernels/*.cl))
CACHE_SRC  := $(sort $(wildcard cache/*.c))
TEXT_SRC   := $(sort $(wildcard daemon/text/*.c))
MODEL_SRC  := $(sort $(wildcard daemon/model/*.c))
ENGINE_SRC := $(sort $(wildcard daemon/engine/*.c))
CONFIG_SRC := $(sort $(wildcard daemon/config/*.c))
BUS_SRC    := $(sort $(wildcard daemon/bus/*.c))
CTL_SRC    := $(sort $(wildcard daemon/ctl/*.c))
LIB_SRC    := $(QUANT_SRC) $(OPENCL_SRC) $(CACHE_SRC) $(TEXT_SRC) $(MODEL_SRC) $(ENGINE_SRC) $(CONFIG_SRC)

UNIT_TESTS   := $(patsubst tests/%.c,$(BUILD)/tests/%,$(sort $(wildcard tests/unit/test-*.c)))
PARITY_TESTS := $(patsubst tests/%.c,$(BUILD)/tests/%,$(sort $(wildcard tests/parity/test-*.c)))
BENCHES      := $(patsubst tests/%.c,$(BUILD)/tests/%,$(sort $(wildcard tests/bench/bench-*.c)))

lib_objects  := $(LIB_SRC:%.c=$(BUILD)/%.o) $(BUILD)/opencl/kernels.o
bus_objects  := $(BUS_SRC:%.c=$(BUILD)/%.o)
ctl_objects  := $(CTL_SRC:%.c=$(BUILD)/%.o)

.PHONY: all
all: programs

.PHONY: programs
programs: $(BUILD)/leatd $(BUILD)/leat

$(BUILD)/leatd: $(BUILD)/daemon/main.o $(bus_objects) $(BUILD)/libleat.a
	$(call say,LINK,$@)
	$(Q)$(CC) $(ALL_LDFLAGS) -o $@ $^ $(LIBS)

$(BUILD)/leat: $(ctl_objects) $(BUILD)/libleat.a
	$(call say,LINK,$@)
	$(Q)$(CC) $(ALL_LDFLAGS) -o $@ $^ $(LIBS)

$(BUILD)/libleat.a: $(lib_objects)
	$(call say,AR,$@)
	$(Q)rm -f $@ && ar rcs $@ $^

$(BUILD)/%.o: %.c $(BUILD)/flags
	$(call say,CC,$<)
	@mkdir -p $(@D)
	$(Q)$(CC) $(ALL_CFLAGS) -MMD -MP -c -o $@ $<

# Kernels become bytes of the library; the table names them (opencl/kernels.h).
$(BUILD)/opencl/kernels.S: $(KERNELS) Makefile
	@mkdir -p $(@D)
	$(Q){ printf '.section .rodata\n'; i=0; \
	  for k in $(KERNELS); do \
	    printf 'kn%d: .asciz "%s"\nks%d: .incbin "%s"\nke%d: .byte 0\n' $$i $$(basename $$k) $$i $$k $$i; i=$$((i+1)); done; \
	  printf '.section .data.rel.ro,"aw"\n.balign 8\n.globl leat_kernel_sources\nleat_kernel_sources:\n'; i=0; \
	  for k in $(KERNELS); do printf '.quad kn%d, ks%d, ke%d - ks%d\n' $$i $$i $$i $$i; i=$$((i+1)); done; \
	  printf '.quad 0, 0, 0\n.section .note.GNU-stack,"",%%progbits\n'; } > $@

$(BUILD)/opencl/kernels.o: $(BUILD)/opencl/kernels.S
	$(call say,EMBED,$@)
	$(Q)$(CC) -c -o $@ $<

# Rebuild everything when the flags change.
$(BUILD)/flags: FORCE
	@mkdir -p $(@D)
	@printf '%s\n' '$(CC) $(subst ','"'"',$(ALL_CFLAGS) $(ALL_LDFLAGS))' > $@.new; cmp -s $@ $@.new && rm $@.new || mv $@.new $@
.PHONY: FORCE
FORCE:

# ---- tests ------------------------------------------------------------------------------------------------------------------

test_objects := $(patsubst %.c,$(BUILD)/%.o,$(sort $(wildcard tests/lib/*.c)))

$(BUILD)/tests/%: $(BUILD)/tests/%.o $(test_objects) $(BUILD)/libleat.a
	$(call say,LINK,$@)
	$(Q)$(CC) $(ALL_LDFLAGS) -o $@ $^ -lcmocka $(LIBS)

.PHONY: tests
tests: $(UNIT_TESTS) $(PARITY_TESTS)

# make test T=kv-codec F='*odd*' runs one program, one pattern; no match is a failure.
.PHONY: test
test: $(BUILD)/tests/unit/test-$(T)
	$(Q)CMOCKA_TEST_FILTER='$(F)' $<

.PRECIOUS: $(BUILD)/%.o
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
