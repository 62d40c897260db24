//! The bytes of one KV block: what llama.cpp's sequence state looks like once everything that
//! depends on *where* it was taken from is gone.
//!
//! Contract: equal KV gives equal bytes, whatever sequence, cells or order it was computed in.
//! Every block of a model in one [`KvLayout`] has exactly [`KvLayout::block_bytes`] bytes.
//! Nothing about positions or sequences is stored, so nothing about them can be trusted wrongly:
//! both are made anew from the range that the importer expects.
//! Structure is checked here, before llama.cpp sees a byte; values cannot be, which is why the
//! store checks sums.
//!
//! Layout, version 1, little endian (frozen; a change needs a new [`FORMAT_VERSION`], which is
//! part of the layout fingerprint):
//!
//! ```text
//! offset  bytes  field
//!      0      4  magic "LKV1"
//!      4      4  u32 tokens of the block
//!      8      4  u32 V is transposed (0 or 1)
//!     12      4  u32 layers
//!     16      4  u32 rotation of K     \ llama.cpp's own fields: Hadamard rotation of quantised
//!     20      4  u32 rotation of V     / caches, 0 when there is none
//!     24         per layer: i32 ggml type of K, u64 bytes a row, K rows [tokens][row]
//!                then per layer V: not transposed: i32 type, u64 bytes a row, rows [tokens][row]
//!                                  transposed:     i32 type, u32 bytes an element, u32 width,
//!                                                  elements [width][tokens]
//! ```
//!
//! llama.cpp's state (`llama_kv_cache::state_write`) has the same bytes from offset 8 on, after
//! its own head of `u32 magic, i32 sequence, u32 streams, u32 cells` and, for each cell,
//! `i32 position, u32 1, i32 sequence`. Rows are in cell order there and in position order here.

/// Version of the format above. Part of the layout fingerprint: other versions are other blocks.
pub const FORMAT_VERSION: u32 = 1;

const BLOCK_MAGIC: [u8; 4] = *b"LKV1";
const BLOCK_HEAD_BYTES: usize = 8;
const STATE_MAGIC: u32 = 0xaf14_3cd8;
const STATE_HEAD_BYTES: usize = 16;
const CELL_BYTES: usize = 12;
/// More layers than any model has; a count beyond it is damage, not a model.
const MAX_LAYERS: u32 = 4096;

/// What is wrong with the structure of a state or a block.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Shorter or longer than every block of this model.
    #[error("{actual} bytes, expected {expected}")]
    Length {
        /// Bytes given.
        actual: usize,
        /// Bytes that a block of this model has.
        expected: usize,
    },
    /// A field that is fixed for this model has another value.
    #[error("{field} differs from this model's at offset {offset}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// Its offset in the bytes given.
        offset: usize,
    },
    /// The cells are not exactly the positions of the block.
    #[error("cell {cell} holds position {position}, expected one of {first} to {last}, once each")]
    Cell {
        /// Index of the cell in the state.
        cell: usize,
        /// Position found.
        position: i64,
        /// First position of the block.
        first: i64,
        /// Last position of the block.
        last: i64,
    },
}

/// Where the values of one block lie: types, sizes and order of its rows. Learned once from a
/// state of the running model, then the measure for every block that leaves or enters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvLayout {
    tokens: usize,
    sections: Vec<Section>,
    block_bytes: usize,
    keys: Vec<Values>,
    values: Vec<Values>,
    transposed: bool,
}

/// Type and width of one layer's K or V.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Values {
    /// ggml's number of the element type.
    pub ggml_type: i32,
    /// Bytes that one token takes in this layer.
    pub token_bytes: u64,
}

/// A stretch of the bytes from offset 8 on.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Section {
    /// The same in every block of the model.
    Fixed { name: &'static str, bytes: Vec<u8> },
    /// `[groups][tokens][unit]`: rows are one group of wide units, transposed values many groups
    /// of single elements.
    Values { groups: usize, unit: usize },
}

impl KvLayout {
    /// Reads the layout off a state of exactly one block, as llama.cpp wrote it.
    pub fn learn(state: &[u8], block_tokens: u32) -> Result<Self, FormatError> {
        let tokens = block_tokens as usize;
        check_state_head(state, tokens)?;
        let mut reader = Reader { bytes: state, at: STATE_HEAD_BYTES + CELL_BYTES * tokens };
        let mut layout = Self {
            tokens,
            sections: Vec::new(),
            block_bytes: 0,
            keys: Vec::new(),
            values: Vec::new(),
            transposed: false,
        };
        let start = reader.at;
        layout.transposed = match reader.u32("v_trans")? {
            0 => false,
            1 => true,
            _ => return Err(reader.wrong("v_trans")),
        };
        let layers = reader.u32("layer count")?;
        if layers == 0 || layers > MAX_LAYERS {
            return Err(reader.wrong("layer count"));
        }
        reader.take(8, "rotations")?;
        layout.fix("cache head", &state[start..reader.at]);
        for _ in 0..layers {
            let rows = layout.learn_rows(&mut reader, "K head")?;
            layout.keys.push(rows);
        }
        // A layer without V (MLA keeps K only) writes nothing: the end of the bytes ends the list.
        while reader.at < state.len() {
            let rows = if layout.transposed {
                layout.learn_columns(&mut reader)?
            } else {
                layout.learn_rows(&mut reader, "V head")?
            };
            layout.values.push(rows);
            if layout.values.len() > layout.keys.len() {
                return Err(reader.wrong("V layers"));
            }
        }
        layout.block_bytes = BLOCK_HEAD_BYTES + state.len() - start;
        Ok(layout)
    }

    /// Bytes of every block.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Tokens of every block.
    #[must_use]
    pub fn block_tokens(&self) -> usize {
        self.tokens
    }

    /// K of each layer.
    #[must_use]
    pub fn keys(&self) -> &[Values] {
        &self.keys
    }

    /// V of each layer that has one.
    #[must_use]
    pub fn values(&self) -> &[Values] {
        &self.values
    }

    /// Whether V is stored by element instead of by token, as without flash attention.
    #[must_use]
    pub fn values_transposed(&self) -> bool {
        self.transposed
    }

    /// The fields that are the same in every block: two engines can exchange blocks only if these
    /// bytes are equal.
    #[must_use]
    pub fn fixed_bytes(&self) -> Vec<u8> {
        let fixed = self.sections.iter().filter_map(|section| match section {
            Section::Fixed { bytes, .. } => Some(bytes.as_slice()),
            Section::Values { .. } => None,
        });
        fixed.flatten().copied().collect()
    }

    /// Bytes of the llama.cpp state that holds one block.
    #[must_use]
    pub fn state_bytes(&self) -> usize {
        STATE_HEAD_BYTES + CELL_BYTES * self.tokens + self.block_bytes - BLOCK_HEAD_BYTES
    }

    /// Turns llama.cpp's state of the positions from `first` on into the block's bytes.
    /// `block` is cleared first; on an error its content means nothing.
    pub fn normalise(
        &self,
        state: &[u8],
        first: i64,
        block: &mut Vec<u8>,
    ) -> Result<(), FormatError> {
        if state.len() != self.state_bytes() {
            let expected = self.state_bytes();
            return Err(FormatError::Length { actual: state.len(), expected });
        }
        check_state_head(state, self.tokens)?;
        let order = self.cells_in_position_order(state, first)?;
        let in_order = order.iter().enumerate().all(|(place, cell)| place == *cell);

        block.clear();
        block.reserve_exact(self.block_bytes);
        block.extend_from_slice(&BLOCK_MAGIC);
        block.extend_from_slice(&u32_of(self.tokens).to_le_bytes());
        let body = STATE_HEAD_BYTES + CELL_BYTES * self.tokens;
        self.check_fixed(&state[body..], body)?;
        if in_order {
            block.extend_from_slice(&state[body..]);
            return Ok(());
        }
        let mut at = body;
        for section in &self.sections {
            let len = section.len(self.tokens);
            let source = &state[at..at + len];
            match section {
                Section::Fixed { .. } => block.extend_from_slice(source),
                Section::Values { unit, .. } => {
                    for group in source.chunks_exact(unit * self.tokens) {
                        for cell in &order {
                            block.extend_from_slice(&group[cell * unit..(cell + 1) * unit]);
                        }
                    }
                }
            }
            at += len;
        }
        Ok(())
    }

    /// Whether these bytes have the structure of a block of this model.
    pub fn check(&self, block: &[u8]) -> Result<(), FormatError> {
        if block.len() != self.block_bytes {
            return Err(FormatError::Length { actual: block.len(), expected: self.block_bytes });
        }
        if block[..4] != BLOCK_MAGIC {
            return Err(FormatError::Field { field: "block magic", offset: 0 });
        }
        if block[4..8] != u32_of(self.tokens).to_le_bytes() {
            return Err(FormatError::Field { field: "tokens of the block", offset: 4 });
        }
        self.check_fixed(&block[BLOCK_HEAD_BYTES..], BLOCK_HEAD_BYTES)
    }

    /// Makes the state that puts a block at the positions from `first` on. The head comes from
    /// the arguments alone. `state` is cleared first.
    pub fn denormalise(
        &self,
        block: &[u8],
        first: i32,
        sequence: i32,
        state: &mut Vec<u8>,
    ) -> Result<(), FormatError> {
        self.check(block)?;
        state.clear();
        state.reserve_exact(self.state_bytes());
        for field in [STATE_MAGIC, sequence.cast_unsigned(), 1, u32_of(self.tokens)] {
            state.extend_from_slice(&field.to_le_bytes());
        }
        for position in (first..).take(self.tokens) {
            state.extend_from_slice(&position.to_le_bytes());
            state.extend_from_slice(&1_u32.to_le_bytes());
            state.extend_from_slice(&sequence.to_le_bytes());
        }
        state.extend_from_slice(&block[BLOCK_HEAD_BYTES..]);
        Ok(())
    }

    /// For each position of the block, the cell of the state that holds it.
    fn cells_in_position_order(&self, state: &[u8], first: i64) -> Result<Vec<usize>, FormatError> {
        const FREE: usize = usize::MAX;
        let last = first + i64::try_from(self.tokens).unwrap_or(i64::MAX) - 1;
        let mut order = vec![FREE; self.tokens];
        let cells = state[STATE_HEAD_BYTES..].chunks_exact(CELL_BYTES).take(self.tokens);
        for (cell, fields) in cells.enumerate() {
            let position = i64::from(i32_at(fields, 0));
            let place = usize::try_from(position - first).unwrap_or(FREE);
            let sequences = u32_at(fields, 4);
            match order.get_mut(place) {
                Some(slot) if *slot == FREE && sequences == 1 => *slot = cell,
                _ => return Err(FormatError::Cell { cell, position, first, last }),
            }
        }
        Ok(order)
    }

    /// `body` has the right length, so every section is inside it.
    fn check_fixed(&self, body: &[u8], offset: usize) -> Result<(), FormatError> {
        let mut at = 0;
        for section in &self.sections {
            let len = section.len(self.tokens);
            if let Section::Fixed { name, bytes } = section
                && body[at..at + len] != **bytes
            {
                return Err(FormatError::Field { field: name, offset: offset + at });
            }
            at += len;
        }
        Ok(())
    }

    fn learn_rows(
        &mut self,
        reader: &mut Reader<'_>,
        name: &'static str,
    ) -> Result<Values, FormatError> {
        let head = reader.take(12, name)?;
        let ggml_type = i32_at(head, 0);
        let token_bytes = u64::from(u32_at(head, 4)) | (u64::from(u32_at(head, 8)) << 32);
        let unit = usize::try_from(token_bytes).map_err(|_| reader.wrong(name))?;
        self.fix(name, head);
        self.learn_values(reader, 1, unit, name)?;
        Ok(Values { ggml_type, token_bytes })
    }

    fn learn_columns(&mut self, reader: &mut Reader<'_>) -> Result<Values, FormatError> {
        const NAME: &str = "V head";
        let head = reader.take(12, NAME)?;
        let (ggml_type, element, width) = (i32_at(head, 0), u32_at(head, 4), u32_at(head, 8));
        self.fix(NAME, head);
        self.learn_values(reader, width as usize, element as usize, NAME)?;
        Ok(Values { ggml_type, token_bytes: u64::from(element) * u64::from(width) })
    }

    fn learn_values(
        &mut self,
        reader: &mut Reader<'_>,
        groups: usize,
        unit: usize,
        name: &'static str,
    ) -> Result<(), FormatError> {
        let len = groups.checked_mul(unit).and_then(|len| len.checked_mul(self.tokens));
        match len {
            Some(len) if len > 0 => reader.take(len, name)?,
            _ => return Err(reader.wrong(name)),
        };
        self.sections.push(Section::Values { groups, unit });
        Ok(())
    }

    fn fix(&mut self, name: &'static str, bytes: &[u8]) {
        self.sections.push(Section::Fixed { name, bytes: bytes.to_vec() });
    }
}

impl Section {
    fn len(&self, tokens: usize) -> usize {
        match self {
            Self::Fixed { bytes, .. } => bytes.len(),
            Self::Values { groups, unit } => groups * unit * tokens,
        }
    }
}

fn check_state_head(state: &[u8], tokens: usize) -> Result<(), FormatError> {
    let head = STATE_HEAD_BYTES + CELL_BYTES * tokens;
    if state.len() < head {
        return Err(FormatError::Length { actual: state.len(), expected: head });
    }
    for (field, offset, expected) in
        [("state magic", 0, STATE_MAGIC), ("streams", 8, 1), ("cells", 12, u32_of(tokens))]
    {
        if u32_at(state, offset) != expected {
            return Err(FormatError::Field { field, offset });
        }
    }
    Ok(())
}

/// Takes fields off the front; every read is checked against what is left.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize, field: &'static str) -> Result<&'a [u8], FormatError> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or(FormatError::Field { field, offset: self.at })?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn u32(&mut self, field: &'static str) -> Result<u32, FormatError> {
        Ok(u32_at(self.take(4, field)?, 0))
    }

    fn wrong(&self, field: &'static str) -> FormatError {
        FormatError::Field { field, offset: self.at }
    }
}

/// The caller has checked that `bytes` reaches to `offset + 4`.
fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    let mut field = [0; 4];
    field.copy_from_slice(&bytes[offset..offset + 4]);
    u32::from_le_bytes(field)
}

fn i32_at(bytes: &[u8], offset: usize) -> i32 {
    u32_at(bytes, offset).cast_signed()
}

/// Block lengths come from the configuration, which keeps them far below `u32::MAX`.
fn u32_of(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
