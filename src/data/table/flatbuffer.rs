//! Reads flatbuffers, the encoding of Arrow's metadata: tables of optional fields, structs in vectors, strings.
//!
//! Every access is checked against the buffer; what does not fit is `None`, never a panic. The positions of a damaged
//! buffer cannot form an endless structure, because each table is visited by the schema of Arrow, which has a fixed
//! depth except for nested columns.

/// A table at a position of a buffer.
#[derive(Clone, Copy, Debug)]
pub struct Table<'a> {
    buffer: &'a [u8],
    position: usize,
}

impl<'a> Table<'a> {
    /// The root table of a buffer.
    pub fn root(buffer: &'a [u8]) -> Option<Self> {
        Self { buffer, position: 0 }.indirect(0)
    }

    fn bytes<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.buffer.get(at..at.checked_add(N)?)?.try_into().ok()
    }

    /// The table that the offset at `at` refers to.
    fn indirect(&self, at: usize) -> Option<Self> {
        let position = at.checked_add(u32::from_le_bytes(self.bytes(at)?) as usize)?;
        (position < self.buffer.len()).then_some(Self { buffer: self.buffer, position })
    }

    /// Position of a field; `None` if the table leaves it at its default.
    fn field(&self, index: usize) -> Option<usize> {
        let back = i64::from(i32::from_le_bytes(self.bytes(self.position)?));
        let vtable = usize::try_from(self.position as i64 - back).ok()?;
        let size = u16::from_le_bytes(self.bytes(vtable)?) as usize;
        let slot = 4 + 2 * index;
        if slot + 2 > size {
            return None;
        }
        match u16::from_le_bytes(self.bytes(vtable + slot)?) {
            0 => None,
            offset => self.position.checked_add(offset as usize),
        }
    }

    pub fn bool(&self, index: usize) -> bool {
        self.u8(index) != 0
    }

    pub fn u8(&self, index: usize) -> u8 {
        self.field(index).and_then(|at| self.bytes::<1>(at)).map_or(0, |[byte]| byte)
    }

    pub fn i16(&self, index: usize) -> Option<i16> {
        self.bytes(self.field(index)?).map(i16::from_le_bytes)
    }

    pub fn i32(&self, index: usize) -> Option<i32> {
        self.bytes(self.field(index)?).map(i32::from_le_bytes)
    }

    pub fn i64(&self, index: usize) -> Option<i64> {
        self.bytes(self.field(index)?).map(i64::from_le_bytes)
    }

    pub fn table(&self, index: usize) -> Option<Self> {
        self.indirect(self.field(index)?)
    }

    /// First byte and number of elements of a vector whose elements have `element` bytes.
    fn vector(&self, index: usize, element: usize) -> Option<(usize, usize)> {
        let Self { position, .. } = self.indirect(self.field(index)?)?;
        let len = u32::from_le_bytes(self.bytes(position)?) as usize;
        let end = len.checked_mul(element)?.checked_add(position + 4)?;
        (end <= self.buffer.len()).then_some((position + 4, len))
    }

    pub fn text(&self, index: usize) -> Option<&'a str> {
        let (first, len) = self.vector(index, 1)?;
        std::str::from_utf8(&self.buffer[first..first + len]).ok()
    }

    pub fn tables(&self, index: usize) -> Vec<Self> {
        let Some((first, len)) = self.vector(index, 4) else { return Vec::new() };
        (0..len).filter_map(|i| self.indirect(first + 4 * i)).collect()
    }

    /// A vector of structs of `N` 64-bit fields.
    pub fn structs<const N: usize>(&self, index: usize) -> Vec<[i64; N]> {
        let Some((first, len)) = self.vector(index, 8 * N) else { return Vec::new() };
        let value = |i: usize| self.bytes(first + 8 * i).map_or(0, i64::from_le_bytes);
        (0..len).map(|i| std::array::from_fn(|field| value(i * N + field))).collect()
    }
}
