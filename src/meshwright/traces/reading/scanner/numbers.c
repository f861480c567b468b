/* Decimal numbers in text, as whole ones. Stands behind texts.c. */

/* Digits with point and exponent, times ten to the power, rounded half away from zero. Text is decimal and times since
   the epoch exceed what doubles hold, so no double is made. */
static int scaled(text p, text q, int power, int64_t *out) {
  unsigned char digits[64];
  int64_t count = 0, point = -1, exponent = 0;
  int negative = p < q && *p == '-', down = 0, any = 0;
  for (p += negative; p < q && ((*p >= '0' && *p <= '9') || *p == '.'); p++) {
    if (*p == '.') {
      if (point >= 0) return 0;
      point = count;
      continue;
    }
    any = 1;
    if (count || *p != '0' || point >= 0) { /* a leading zero says nothing */
      if (count < 64) digits[count] = *p - '0';
      else if (point < 0) return 0;
      if (count < 64) count++;
    }
  }
  if (!any) return 0;
  if (point < 0) point = count;
  if (p < q && (*p == 'e' || *p == 'E')) {
    p++;
    if (p < q && (*p == '-' || *p == '+')) down = *p++ == '-';
    if (p == q) return 0;
    for (; p < q && *p >= '0' && *p <= '9'; p++)
      if (exponent < 10000) exponent = 10 * exponent + (*p - '0');
  }
  if (p != q) return 0;
  point += power + (down ? -exponent : exponent);
  uint64_t value = 0;
  for (int64_t i = 0; i < point; i++) {
    uint64_t digit = i < count ? digits[i] : 0;
    if (value > (INT64_MAX - digit) / 10) return 0;
    value = 10 * value + digit;
    if (!value && i >= count) break; /* zero however long */
  }
  if (point >= 0 && point < count && digits[point] >= 5) value++;
  if (value > INT64_MAX) return 0;
  *out = negative ? -(int64_t)value : (int64_t)value;
  return 1;
}

/* A number, also one in quotes: in thousandths for times (microseconds to nanoseconds), otherwise whole. */
static int number(text p, text q, int power, int64_t *out) {
  if (*p == '"') p++, q--;
  text start = p;
  uint64_t value = 0;
  while (p < q && *p >= '0' && *p <= '9') value = 10 * value + (*p++ - '0');
  if (p == start || p - start > 18) return scaled(start, q, power, out);
  if (!power) {
    *out = (int64_t)value;
    return p == q || scaled(start, q, power, out);
  }
  if (value >= INT64_MAX / 1000) return scaled(start, q, power, out);
  if (p == q) {
    *out = (int64_t)value * 1000;
    return 1;
  }
  if (q - p == 4 && *p == '.' && p[1] >= '0' && p[1] <= '9' && p[2] >= '0' && p[2] <= '9' && p[3] >= '0' && p[3] <= '9') {
    *out = (int64_t)value * 1000 + (p[1] - '0') * 100 + (p[2] - '0') * 10 + (p[3] - '0');
    return 1;
  }
  return scaled(start, q, power, out);
}
